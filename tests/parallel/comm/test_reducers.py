"""Gradients summed over holders, whole or in slices: the same numbers, early or late, in buckets of any size."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from parallel.comm import grad_reducer
from parallel.comm.communicator import Communicator, part_bytes, sum_bytes
from parallel.comm.grad_reducer import GradReducer, broadcast_tensors
from parallel.comm.sharded_reducer import ShardedReducer, joined
from parallel.comm.thread_comm import run_on_threads
from parallel.engine.rank_program import last_backwards
from parallel.offload.live_bytes import LiveBytes
from parallel.schedule.action import Action
from tests.helpers.small_nets import drawn_once
from tests.helpers.watched_comm import WatchedCommunicator

WORLD = 3
SUMS = {None: 1, 0: 1, 200: 4, 400: 3, 1: 6}
"""Size of buckets -> how many there are of weights of 288, 288 and 96 bytes and biases of 48, 48 and 16."""


def model() -> nn.Module:
    def layers() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 2)).double()

    return drawn_once("reduced", 0, layers)


def loss(net: nn.Module, rank: int, i: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * rank + i)
    value: Tensor = net(torch.randn(3, 6, generator=generator, dtype=torch.float64)).square().sum()
    return value


def summed(short: bool = False) -> list[Tensor]:
    """Gradients of two microbatches on each rank; with ``short`` the last rank has one."""
    plain = model()
    for rank in range(WORLD):
        for i in range(1 if short and rank == WORLD - 1 else 2):
            loss(plain, rank, i).backward()
    return [parameter.grad for parameter in plain.parameters()]


@pytest.mark.pairs
@pytest.mark.parametrize("size", SUMS)
@pytest.mark.parametrize("armed", [True, False])
@pytest.mark.parametrize("overlap", [True, False])
def test_sums_are_those_of_all_ranks(armed: bool, overlap: bool, size: int | None) -> None:
    def step(communicator: Communicator, _: Any) -> list[Tensor]:
        net, begun = model(), list[str]()
        counting = WatchedCommunicator(communicator, lambda name, *_: begun.append(name))
        sums = GradReducer(net.parameters(), counting, overlap=overlap, bucket_bytes=size)
        assert len(sums.buckets) == SUMS[size]
        for _step in range(2):
            begun.clear()
            sums.begin_step()
            loss(net, communicator.rank, 0).backward()
            assert not begun
            if armed:
                sums.expect_final_grads()
            loss(net, communicator.rank, 1).backward()
            assert begun == ["iall_reduce"] * (len(sums.buckets) if armed and overlap else 0)
            sums.begin()
            sums.finish()
        return [parameter.grad.clone() for parameter in net.parameters()]

    ranks = run_on_threads(WORLD, step, timeout_s=30)
    assert all(torch.equal(gradient, other) for found in ranks for gradient, other in zip(found, ranks[0], strict=True))
    torch.testing.assert_close(ranks[0], summed(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("size", [None, 0, 400, 1])
@pytest.mark.parametrize("armed", [True, False])
@pytest.mark.parametrize("rounds", [1, 2])
def test_slices_are_those_of_whole_sums(rounds: int, armed: bool, size: int | None) -> None:
    """The last rank has one microbatch of two; with two rounds it brings zeros to the second."""

    def step(communicator: Communicator, _: Any) -> tuple[list[Tensor], int, int, int]:
        net, last = model(), communicator.rank == WORLD - 1
        shard = ShardedReducer(net.parameters(), communicator, overlap=True, bucket_bytes=size)
        for _step in range(2):
            shard.begin_step()
            for i in range(2):
                if armed and (rounds == 2 or i == 1):
                    shard.expect_final_grads()
                if not (last and i == 1):
                    loss(net, communicator.rank, i).backward()
                if rounds == 2 or i == 1:
                    shard.begin()
            shard.finish()
            assert all(parameter.grad is None for parameter in net.parameters())
        whole, held = shard.gathered_gradients(), [bucket.own.nbytes for bucket in shard._slices]
        pieces = [piece.value.grad.numel() for piece in shard.pieces if piece.value.grad is not None]
        return [whole[parameter] for parameter in net.parameters()], sum(held), sum(pieces), shard.sent_bytes

    ranks, expected = run_on_threads(WORLD, step, timeout_s=30), summed(short=True)
    numbers, parameters = sum(gradient.numel() for gradient in expected), len(expected)
    assert sum(pieces for _, _, pieces, _ in ranks) == numbers
    for found, held, _, sent in ranks:
        assert 0 <= held - 8 * numbers / WORLD < 8 * parameters  # a bucket is filled up to a multiple of the ranks
        sums = sent - sum_bytes(4 * parameters, WORLD)
        assert sums == pytest.approx(rounds * part_bytes(held * WORLD, WORLD), abs=8 * parameters)
        assert all(torch.equal(gradient, other) for gradient, other in zip(found, ranks[0][0], strict=True))
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_the_size_of_buckets_changes_no_bit_where_sums_are_in_order_of_rank() -> None:
    def step(communicator: Communicator, size: int | None) -> list[Tensor]:
        net = model()
        sums = GradReducer(net.parameters(), communicator, overlap=True, bucket_bytes=size)
        sums.begin_step()
        sums.expect_final_grads()
        loss(net, communicator.rank, 0).backward()
        sums.begin()
        sums.finish()
        return [parameter.grad.clone() for parameter in net.parameters()]

    first, *others = (run_on_threads(WORLD, step, size, timeout_s=30)[0] for size in SUMS)
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))


def test_a_gradient_that_one_rank_has_is_everybodys_and_one_that_nobody_has_stays_none() -> None:
    """In the layout of its parameter."""

    def step(communicator: Communicator, sliced: bool) -> list[bool]:
        used = nn.Parameter(torch.ones(4, 3, 2, 2).to(memory_format=torch.channels_last))
        unused = nn.Parameter(torch.ones(3))
        kind = ShardedReducer if sliced else GradReducer
        sums: Any = kind([used, unused], communicator, overlap=True)
        sums.begin_step()
        if communicator.rank == 1:
            (used * 0).sum().backward()
        sums.begin()
        sums.finish()
        found = sums.gathered_gradients() if sliced else {p: p.grad for p in (used, unused) if p.grad is not None}
        return [used in found and found[used].stride() == used.stride(), unused in found]

    for sliced in (False, True):
        assert run_on_threads(2, step, sliced, timeout_s=30) == [[True, False]] * 2


@pytest.mark.parametrize(
    ("kind", "use"), [(GradReducer, "--gradient-buckets=0"), (ShardedReducer, "--zero 1 and --gradient-buckets=0")]
)
@pytest.mark.parametrize("reentrant", [True, False])
def test_a_gradient_that_comes_after_the_sum_of_its_bucket_has_begun_is_refused(
    reentrant: bool, kind: Any, use: str
) -> None:
    """It was left out of the sum, or added while that was under way. ``--zero 2`` takes no --gradient-buckets=0."""

    def step(communicator: Communicator, _: Any) -> None:
        layer = nn.Linear(3, 3)
        sums = kind(layer.parameters(), communicator, overlap=True)
        sums.begin_step()
        sums.expect_final_grads()
        value = torch.ones(2, 3, requires_grad=True)
        for _use in range(2):
            value = checkpoint(layer, value, use_reentrant=reentrant)
        value.sum().backward()
        sums.begin()
        sums.finish()

    refused = pytest.raises(ValueError, match=rf"shape \(3.*use_reentrant=False, or use {use}")
    with refused if reentrant else contextlib.nullcontext():
        run_on_threads(2, step, timeout_s=30)


def test_what_a_bucket_holds() -> None:
    """One type of number whatever its size, and no frozen parameters."""
    several = [nn.Parameter(torch.ones(3, dtype=dtype)) for dtype in (torch.float32, torch.float64, torch.float64)]
    frozen = nn.Parameter(torch.ones(4), requires_grad=False)
    sums = GradReducer([*several, frozen], None, overlap=True, bucket_bytes=0)
    assert [(bucket.flat.dtype, len(bucket.parameters)) for bucket in sums.buckets] == [
        (torch.float64, 2),
        (torch.float32, 1),
    ]


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
        communicator.broadcast = lambda tensor, source: (sizes.append(tensor.nbytes), send(tensor, source))[1]
        broadcast_tensors(communicator, tensors, 1)
        return all(bool((tensor == (3.0 if tensor.is_floating_point() else 1)).all()) for tensor in tensors)

    assert run_on_threads(2, broadcast) == [True, True]
    assert sorted(sizes) == sorted([32, 12, 160, 80] * 2)


def test_updated_slices_are_gathered() -> None:
    def step(communicator: Communicator, _: Any) -> list[Tensor]:
        net = model()
        shard = ShardedReducer(net.parameters(), communicator, overlap=True, bucket_bytes=400)
        with torch.no_grad():
            for piece in shard.pieces:
                piece.value.add_(1)
        shard.gather_parameters()
        return [parameter.detach() for parameter in net.parameters()]

    expected = [parameter.detach() + 1 for parameter in model().parameters()]
    for found in run_on_threads(WORLD, step, timeout_s=30):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_states_of_pieces_are_parts_of_the_whole_state() -> None:
    """In the order of the parameter's memory, whatever that of the saved state."""
    torch.manual_seed(1)
    weight = nn.Parameter(torch.randn(5, 3, 2, 2).to(memory_format=torch.channels_last))
    whole = {"exp_avg": torch.randn(5, 3, 2, 2), "step": torch.tensor(3.0), "averaged_updates": 2}

    def rank(communicator: Communicator, _: Any) -> tuple[int, dict[str, Any]]:
        (piece,) = ShardedReducer([weight], communicator, overlap=True).pieces
        return piece.begin, piece.of_state(whole)

    parts = dict(run_on_threads(WORLD, rank, timeout_s=30))
    assert [part["exp_avg"].numel() for part in parts.values()] == [20, 20, 20]
    state = joined(weight, parts)
    assert state["exp_avg"].stride() == weight.stride()
    assert torch.equal(state["exp_avg"], whole["exp_avg"])
    assert (state["step"], state["averaged_updates"]) == (torch.tensor(3.0), 2)


LAYERS, WIDTH = 12, 64


def test_two_buckets_are_there_at_a_time() -> None:
    """The gradients of a backward pass take the slice, the bucket that fills and the one that is summed."""

    def step(communicator: Communicator, _: Any, slices: bool) -> int:
        net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
        layer = WIDTH * WIDTH * 4
        shard = ShardedReducer(net.parameters(), communicator, overlap=True, bucket_bytes=layer if slices else 0)
        watch = LiveBytes()
        for _ in range(2):
            with watch:
                shard.begin_step()
                shard.expect_final_grads()
                net(torch.ones(1, WIDTH)).sum().backward()
                shard.begin()
                shard.finish()
        return watch.peak_bytes // layer

    whole, slices = (run_on_threads(2, functools.partial(step, slices=each), timeout_s=30) for each in (False, True))
    assert min(whole) >= LAYERS + LAYERS // 2
    assert max(slices) <= LAYERS // 2 + 3
