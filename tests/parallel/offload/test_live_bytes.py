"""Bytes that live and activations that are kept, counted by hand; segments that are recomputed."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from parallel.offload.live_bytes import LiveBytes, not_counted
from parallel.offload.packing import ActivationMeter, SavedTensor, put_away, storages_of
from parallel.offload.saved_tensors import CheckpointedSegment

MIB = 1 << 20
NUMBERS = MIB // 4


def test_what_is_made_counts_until_nobody_holds_it() -> None:
    before = torch.ones(NUMBERS)
    with LiveBytes() as live:
        first = before + 1
        assert live.bytes == MIB
        second = (first * 2) + 3  # the product lives until the sum is done
        assert (live.bytes, live.peak_bytes) == (2 * MIB, 3 * MIB)
        del first
        assert live.bytes == MIB
        live.peak_bytes = live.bytes
        assert live.peak_bytes == MIB
    assert second[0] == 7
    del second
    assert live.bytes == 0


def test_views_and_changes_in_place_take_nothing() -> None:
    before = torch.ones(4, NUMBERS)
    with LiveBytes() as live:
        one = before[1:3].t()
        before.add_(1).relu_()
        assert live.peak_bytes == 0
        own = one.contiguous()
        part = own[:2].reshape(-1).mul_(2)
        assert (live.bytes, live.peak_bytes) == (2 * MIB, 2 * MIB)
        del own
        assert live.bytes == 2 * MIB  # a view of it is left
        del part, one
        assert live.bytes == 0


def test_what_was_there_counts_once_it_is_added_and_an_optimizer_keeps_its_state() -> None:
    layer = nn.Linear(512, 512, bias=False)
    optimizer = torch.optim.AdamW(layer.parameters())
    with LiveBytes() as live:
        live.add((*layer.parameters(), layer.weight[3:]))
        assert live.bytes == live.peak_bytes == MIB
        layer(torch.ones(1, 512)).sum().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        assert live.bytes == 3 * MIB  # and two moments


def test_memory_that_grows_is_counted_anew_and_tensors_without_data_take_none() -> None:
    with LiveBytes() as live:
        x = torch.empty(0)
        torch.add(torch.ones(NUMBERS), 1, out=x)
        assert live.bytes == MIB
        x.resize_(2 * NUMBERS)
        assert live.bytes == 2 * MIB
        x.untyped_storage().resize_(0)  # behind the dispatcher
        assert live.bytes == 0
        x.untyped_storage().resize_(MIB)
        assert live.bytes == MIB
        with FakeTensorMode():
            kept = torch.ones(1000 * NUMBERS) + 1
        assert kept.numel() == 1000 * NUMBERS
        assert (live.bytes, live.peak_bytes) == (MIB, 2 * MIB)


def test_a_backward_pass() -> None:
    """exp and tanh keep what they give, and gradients are made one by one."""
    x = torch.zeros(NUMBERS, requires_grad=True)
    with LiveBytes() as live:
        loss = x.exp().tanh().sum()
        assert live.bytes == 2 * MIB + 4
        live.peak_bytes = live.bytes
        loss.backward()
        # The gradient of the sum is one number seen often. What tanh kept is gone when the gradient of exp is made.
        assert live.peak_bytes == 3 * MIB + 8
        del loss
        assert live.bytes == MIB
    torch.testing.assert_close(x.grad[0], 1 - torch.tanh(torch.ones(())) ** 2)  # exp(0) = 1


def test_host_copies_are_left_out_for_good() -> None:
    with LiveBytes() as live:
        x = torch.ones(NUMBERS)
        with not_counted():
            host = torch.empty(NUMBERS)
            with not_counted():
                other = torch.empty(NUMBERS)
            again = torch.empty(NUMBERS)
        host.copy_(x).add_(1)
        other[2:].fill_(1)
        again.zero_()
        assert live.bytes == MIB
        back = host.clone()
        assert live.bytes == 2 * MIB
        with not_counted():
            x.add_(1)  # was there: it goes on to count
            assert live.bytes == 2 * MIB
    assert back[0] == 2


def test_a_tensor_made_of_tensors_counts_as_they_do() -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    pair = TwoTensor(torch.ones(NUMBERS), torch.ones(NUMBERS))
    with LiveBytes() as live:
        live.add([pair])
        assert live.bytes == 2 * MIB
        double = pair * 2
        assert live.bytes == 4 * MIB
        del pair, double
        assert live.bytes == 0


def on_thread(size: int, live: LiveBytes | None) -> list[torch.Tensor]:
    made: list[torch.Tensor] = []

    def make() -> None:
        with live.on_other_thread() if live else contextlib.nullcontext(), contextlib.suppress(torch.OutOfMemoryError):
            made.append(torch.ones(size * NUMBERS).exp_())

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    return made


def test_another_thread_counts_where_it_says_so() -> None:
    with LiveBytes() as live:
        assert on_thread(1, None)
        assert live.bytes == 0
        made = on_thread(2, live)
        assert live.bytes == live.peak_bytes == 2 * MIB
        own = made[0] + 1
        own.add_(made[0])
        assert live.bytes == 4 * MIB
        del own
        made.clear()
        assert live.bytes == 0
    on_thread(4, live)  # too late: the block has ended
    assert (live.bytes, live.peak_bytes) == (0, 4 * MIB)
    with LiveBytes(limit=MIB) as live:
        assert not on_thread(2, live)


def test_a_block_ends_after_the_threads_that_count_in_it() -> None:
    entered, ended = threading.Event(), []

    # Ranks that are threads of one process, in tests before this one, may have left it on: it is the process's own.
    before = is_in_torch_dispatch_mode()

    def make(live: LiveBytes) -> None:
        with live.on_other_thread():
            entered.set()
            time.sleep(0.1)
            ended.append(torch.ones(NUMBERS))

    with LiveBytes() as live:
        thread = threading.Thread(target=make, args=(live,))
        thread.start()
        entered.wait(20)
    assert ended
    assert live.peak_bytes == MIB
    thread.join()
    assert is_in_torch_dispatch_mode() == before


def test_two_threads_count_at_once() -> None:
    def make(live: LiveBytes) -> None:
        with live.on_other_thread():
            for _ in range(200):
                torch.ones(10).add_(1)

    with LiveBytes() as live:
        threads = [threading.Thread(target=make, args=(live,)) for _ in range(2)]
        for thread in threads:
            thread.start()
        for _ in range(200):
            torch.ones(10).add_(1)
        for thread in threads:
            thread.join()
        assert live.bytes == 0
    assert 40 <= live.peak_bytes <= 3 * 40


def test_tensors_that_another_thread_still_makes_are_waited_for() -> None:
    """A run hung in one of its first steps: it held the lock, for which the thread that made the next tiles waited."""
    live = LiveBytes()

    def made() -> Iterator[torch.Tensor]:
        thread = threading.Thread(target=lambda: contextlib.ExitStack().enter_context(live.on_other_thread()))
        thread.daemon = True  # a fault leaves it waiting
        thread.start()
        thread.join(10)
        assert not thread.is_alive()
        yield torch.ones(NUMBERS)

    live.add(made())
    assert live.peak_bytes == MIB


def recomputed(layer: nn.Linear, x: Tensor) -> Tensor:
    def compute(value: Tensor) -> tuple[Tensor]:
        return (layer(value).exp(),)

    state = storages_of(layer.parameters())
    segment = CheckpointedSegment(
        compute, put_away([x], SavedTensor), SavedTensor, state, layer.parameters(), contextlib.nullcontext()
    )
    (output,) = segment.forward([x])
    return output


def test_a_parameter_updated_between_forward_and_recompute_is_autograds_error() -> None:
    layer, x = nn.Linear(3, 3), torch.randn(2, 3)
    recomputed(layer, x).sum().backward()
    expected = torch.autograd.grad(layer(x).exp().sum(), list(layer.parameters()))
    assert all(torch.equal(p.grad, gradient) for p, gradient in zip(layer.parameters(), expected, strict=True))
    output = recomputed(layer, x)
    torch.optim.SGD([layer.bias], lr=0.1).step()  # nothing saves a bias, and exp would be another
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


def test_each_storage_counts_once() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 5))
    meter = ActivationMeter()
    x = torch.randn(2, 3, 8, 8)
    with meter.watching(model.parameters()):
        output = model(x)
    # The input, and the output of ReLU, which the linear layer also keeps.
    kept = 4 * (2 * 3 * 64 + 2 * 4 * 36)
    assert meter.bytes == kept
    with meter.watching(model.parameters()):
        other = model(x)
    assert meter.bytes == kept + 4 * 2 * 4 * 36
    output.sum().backward()
    assert meter.bytes == kept
    other.sum().backward()
    assert meter.bytes == 0
    assert meter.peak_bytes == kept + 4 * 2 * 4 * 36
    meter.peak_bytes = meter.bytes
    assert meter.peak_bytes == 0


def test_a_meter_counts_what_is_held_or_saved_until_it_is_dropped() -> None:
    meter, x = ActivationMeter(), torch.randn(10)
    views = [SavedTensor(x, meter), SavedTensor(x[3:], meter)]
    while views:
        assert meter.bytes == 40
        views.pop()
    assert meter.bytes == 0
    with meter.watching():
        output = torch.randn(5, requires_grad=True).exp()
    assert meter.bytes == 20
    del output
    assert meter.bytes == 0
    with meter.watching():
        output = torch.randn(5, requires_grad=True).exp()
    output.detach().add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()
