"""Bytes that live, counted by hand: operations, views, changes in place, backward passes, what is left out."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from parallel.offload.live_bytes import LiveBytes, not_counted

MIB = 1 << 20
NUMBERS = MIB // 4


def test_what_is_made_counts_until_nobody_holds_it() -> None:
    before = torch.ones(NUMBERS)
    with LiveBytes() as live:
        assert live.bytes == 0
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


def test_what_was_there_counts_once_it_is_added() -> None:
    layer = nn.Linear(512, 512)
    with LiveBytes() as live:
        live.add((*layer.parameters(), layer.weight[3:]))
        assert live.bytes == live.peak_bytes == 4 * (512 * 512 + 512)


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
    assert x.grad is not None
    torch.testing.assert_close(x.grad[0], 1 - torch.tanh(torch.ones(())) ** 2)  # exp(0) = 1


def test_an_optimizer_keeps_its_state() -> None:
    layer = nn.Linear(512, 512, bias=False)
    optimizer = torch.optim.AdamW(layer.parameters())
    with LiveBytes() as live:
        layer(torch.ones(1, 512)).sum().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        assert live.bytes == 2 * 4 * 512 * 512  # two moments


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


def test_memory_that_grows_is_counted_anew() -> None:
    with LiveBytes() as live:
        x = torch.empty(0)
        torch.add(torch.ones(NUMBERS), 1, out=x)
        assert live.bytes == MIB
        x.resize_(2 * NUMBERS)
        assert live.bytes == 2 * MIB
    assert x.numel() == 2 * NUMBERS


def test_a_storage_that_is_resized_behind_the_dispatcher() -> None:
    with LiveBytes() as live:
        x = torch.ones(NUMBERS)
        x.untyped_storage().resize_(0)
        assert live.bytes == 0
        x.untyped_storage().resize_(MIB)
        assert live.bytes == MIB


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


def test_tensors_without_data_take_nothing() -> None:
    with LiveBytes() as live, FakeTensorMode():
        kept = torch.ones(1000) + 1
    assert kept.numel() == 1000
    assert live.peak_bytes == 0


def test_another_thread_counts_where_it_says_so() -> None:
    made: list[torch.Tensor] = []

    def make(size: int, live: LiveBytes | None) -> None:
        with live.on_other_thread() if live else contextlib.nullcontext():
            made.append(torch.ones(size * NUMBERS).exp_())

    def on_thread(size: int, live: LiveBytes | None) -> None:
        thread = threading.Thread(target=make, args=(size, live))
        thread.start()
        thread.join()

    with LiveBytes() as live:
        on_thread(1, None)
        assert live.bytes == 0
        on_thread(2, live)
        assert live.bytes == live.peak_bytes == 2 * MIB
        own = made[1] + 1
        own.add_(made[1])
        assert live.bytes == 4 * MIB
        del own
        made.clear()
        assert live.bytes == 0
    on_thread(4, live)  # too late: the block has ended
    assert (live.bytes, live.peak_bytes) == (0, 4 * MIB)


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


def test_a_limit_holds_for_other_threads_too() -> None:
    faults: list[BaseException] = []

    def make(live: LiveBytes) -> None:
        with live.on_other_thread():
            try:
                torch.ones(2 * NUMBERS)
            except torch.OutOfMemoryError as fault:
                faults.append(fault)

    with LiveBytes(limit=MIB) as live:
        thread = threading.Thread(target=make, args=(live,))
        thread.start()
        thread.join()
    assert len(faults) == 1


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
