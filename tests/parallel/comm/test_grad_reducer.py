"""Gradients summed over holders: early or late, the same numbers, in buckets of a sensible size."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parallel.comm import grad_reducer
from parallel.comm.communicator import Communicator, Work
from parallel.comm.grad_reducer import GradReducer, broadcast_tensors
from parallel.comm.thread_comm import run_on_threads
from parallel.engine.rank_program import last_backwards
from parallel.schedule.action import Action


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 2))


INITIAL = model().state_dict()


class Counting:
    """Notes how many sums had begun at each moment."""

    def __init__(self, communicator: Communicator) -> None:
        self.inner = communicator
        self.begun = 0

    def iall_reduce(self, tensor: Tensor) -> Work:
        self.begun += 1
        return self.inner.iall_reduce(tensor)


def copy_of_model() -> nn.Module:
    net = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 2))
    net.load_state_dict(INITIAL)
    return net.double()


def inputs(rank: int, i: int) -> Tensor:
    return torch.randn(3, 6, generator=torch.Generator().manual_seed(10 * rank + i), dtype=torch.float64)


SUMS = {None: 1, 0: 1, 200: 4, 400: 3, 1: 6}
"""Size of buckets -> how many there are of weights of 288, 288 and 96 bytes and biases of 48, 48 and 16."""


@pytest.mark.pairs
@pytest.mark.parametrize("size", SUMS)
@pytest.mark.parametrize("armed", [True, False])
@pytest.mark.parametrize("overlap", [True, False])
def test_sums_are_those_of_all_ranks(armed: bool, overlap: bool, size: int | None) -> None:
    plain = copy_of_model()
    for rank in range(3):
        for i in range(2):
            plain(inputs(rank, i)).square().sum().backward()

    def step(communicator: Communicator, _: Any) -> list[Tensor]:
        net, counting = copy_of_model(), Counting(communicator)
        sums = GradReducer(net.parameters(), counting, overlap=overlap, bucket_bytes=size)  # type: ignore[arg-type]
        assert len(sums.buckets) == SUMS[size]
        for _step in range(2):
            counting.begun = 0
            sums.begin_step()
            net(inputs(communicator.rank, 0)).square().sum().backward()
            assert counting.begun == 0
            if armed:
                sums.expect_final_grads()
            net(inputs(communicator.rank, 1)).square().sum().backward()
            assert counting.begun == (len(sums.buckets) if armed and overlap else 0)
            sums.begin()
            sums.finish()
        return [parameter.grad.clone() for parameter in net.parameters() if parameter.grad is not None]

    ranks = run_on_threads(3, step, timeout_s=30)
    for found in ranks:
        for gradient, other, parameter in zip(found, ranks[0], plain.parameters(), strict=True):
            assert torch.equal(gradient, other)
            assert torch.allclose(gradient, parameter.grad, rtol=1e-12, atol=1e-12)


def test_a_reducer_that_is_dropped_leaves_no_hook() -> None:
    net = copy_of_model()
    sums = GradReducer(net.parameters(), None, overlap=True)  # type: ignore[arg-type]
    hooks = [parameter._post_accumulate_grad_hooks for parameter in net.parameters()]
    assert all(hooks)
    del sums
    assert not any(hooks)


def test_a_bucket_has_one_dtype_whatever_its_size() -> None:
    several = [nn.Parameter(torch.ones(3, dtype=dtype)) for dtype in (torch.float32, torch.float64, torch.float64)]
    sums = GradReducer(several, None, overlap=True, bucket_bytes=0)  # type: ignore[arg-type]
    assert [bucket.flat.dtype for bucket in sums.buckets] == [torch.float64, torch.float32]


def test_the_size_of_buckets_changes_no_bit_where_sums_are_in_order_of_rank() -> None:
    def step(communicator: Communicator, size: int | None) -> list[Tensor]:
        net = copy_of_model().float()
        sums = GradReducer(net.parameters(), communicator, overlap=True, bucket_bytes=size)
        sums.begin_step()
        sums.expect_final_grads()
        net(inputs(communicator.rank, 0).float()).square().sum().backward()
        sums.begin()
        sums.finish()
        return [parameter.grad.clone() for parameter in net.parameters() if parameter.grad is not None]

    first, *others = (run_on_threads(3, step, size, timeout_s=30)[0] for size in SUMS)
    assert len(first) == 6
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def test_a_gradient_that_one_rank_has_is_everybodys_and_one_that_nobody_has_stays_none() -> None:
    def step(communicator: Communicator, _: Any) -> tuple[bool, bool]:
        used, unused = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))
        sums = GradReducer([used, unused], communicator, overlap=True)
        sums.begin_step()
        if communicator.rank == 1:
            (used * 0).sum().backward()
        sums.begin()
        sums.finish()
        return used.grad is not None, unused.grad is None

    assert run_on_threads(2, step, timeout_s=30) == [(True, True)] * 2


def test_frozen_parameters_take_no_part() -> None:
    frozen = nn.Parameter(torch.ones(4), requires_grad=False)
    sums = GradReducer([nn.Parameter(torch.ones(2)), frozen], None, overlap=True)  # type: ignore[arg-type]
    assert [parameter.numel() for bucket in sums.buckets for parameter in bucket.parameters] == [2]


def test_gradients_keep_the_layout_of_their_parameters() -> None:
    weight = nn.Parameter(torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last))
    sums = GradReducer([weight, nn.Parameter(torch.ones(5))], None, overlap=False)  # type: ignore[arg-type]
    sums.begin_step()
    assert weight.grad is not None
    assert weight.grad.stride() == weight.stride()


@pytest.mark.parametrize(
    ("actions", "expected"),
    [
        ("0F0 0F1 0B0 0B1", [3]),
        ("0F0 1F0 1B0 0B0 0F1 1F1 1B1 0B1", [6, 7]),
        ("0F0 0F1 0I0 0B1 0W0 1F0 1B0", [6]),  # gradients of stage 0 come after its backward passes
    ],
)
def test_gradients_of_a_stage_are_final_with_its_last_backward_pass(actions: str, expected: list[int]) -> None:
    assert list(last_backwards(tuple(map(Action.parse, actions.split())))) == expected


def test_tensors_are_broadcast_in_bounded_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of a stage at once would take its memory twice."""
    monkeypatch.setattr(grad_reducer, "BUCKET_BYTES", 100)
    sizes: list[int] = []

    def broadcast(communicator: Communicator, _: Any) -> bool:
        tensors = [torch.full((size,), 3.0 * communicator.rank) for size in (10, 10, 40, 3)]
        tensors.append(torch.full((2, 2), communicator.rank))
        send = communicator.broadcast
        communicator.broadcast = lambda tensor, source: (sizes.append(tensor.nbytes), send(tensor, source))[1]  # type: ignore[method-assign, assignment, func-returns-value]
        broadcast_tensors(communicator, tensors, 1)
        return all(bool((tensor == (3.0 if tensor.is_floating_point() else 1)).all()) for tensor in tensors)

    assert run_on_threads(2, broadcast) == [True, True]
    assert sorted(sizes) == sorted([32, 12, 160, 80] * 2)
