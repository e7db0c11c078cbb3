"""Gradients summed in slices: the numbers of whole sums, equal bytes, buckets that are there only while they fill."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parallel.comm.communicator import Communicator, part_bytes, sum_bytes
from parallel.comm.sharded_reducer import ShardedReducer, joined
from parallel.comm.thread_comm import run_on_threads
from parallel.offload.live_bytes import LiveBytes

WORLD = 3


def model() -> nn.Sequential:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(2, 5, 3), nn.Tanh(), nn.Conv2d(5, 4, 3), nn.Tanh(), nn.Conv2d(4, 1, 1)).double()
    return net.to(memory_format=torch.channels_last)  # type: ignore[call-overload,no-any-return]


def inputs(rank: int, i: int) -> Tensor:
    return torch.randn(2, 2, 7, 7, generator=torch.Generator().manual_seed(10 * rank + i), dtype=torch.float64)


MODEL = model().state_dict()
SIZES = [None, 0, 400, 1]


def copy_of_model() -> nn.Sequential:
    net = nn.Sequential(nn.Conv2d(2, 5, 3), nn.Tanh(), nn.Conv2d(5, 4, 3), nn.Tanh(), nn.Conv2d(4, 1, 1)).double()
    net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    net.load_state_dict(MODEL)
    return net


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("armed", [True, False])
@pytest.mark.parametrize("rounds", [1, 2])
def test_sums_are_those_of_all_ranks(rounds: int, armed: bool, size: int | None) -> None:
    """The last rank has one microbatch of two; with two rounds it brings zeros to the second."""
    plain = copy_of_model()
    for rank in range(WORLD):
        for i in range(2 if rank < 2 else 1):
            plain(inputs(rank, i)).square().sum().backward()

    def step(communicator: Communicator, _: Any) -> tuple[list[Tensor], int, int, int]:
        net, last = copy_of_model(), communicator.rank == 2
        shard = ShardedReducer(net.parameters(), communicator, overlap=True, bucket_bytes=size)
        for _step in range(2):
            shard.begin_step()
            for i in range(2):
                if armed and (rounds == 2 or i == 1):
                    shard.expect_final_grads()
                if not (last and i == 1):
                    net(inputs(communicator.rank, i)).square().sum().backward()
                if rounds == 2 or i == 1:
                    shard.begin()
            shard.finish()
            assert all(parameter.grad is None for parameter in net.parameters())
        whole, held = shard.gathered_gradients(), [bucket.own.nbytes for bucket in shard._slices]  # type: ignore[union-attr]
        pieces = [piece.value.grad.numel() for piece in shard.pieces if piece.value.grad is not None]
        return [whole[parameter] for parameter in net.parameters()], sum(held), sum(pieces), shard.sent_bytes

    ranks = run_on_threads(WORLD, step, timeout_s=30)
    parameters = list(plain.parameters())
    numbers = sum(parameter.numel() for parameter in parameters)
    assert sum(pieces for _, _, pieces, _ in ranks) == numbers
    for found, held, _, sent in ranks:
        assert 0 <= held - 8 * numbers / WORLD < 8 * len(parameters)  # a bucket is filled up to a multiple of the ranks
        sums = sent - sum_bytes(4 * len(parameters), WORLD)
        assert sums == pytest.approx(rounds * part_bytes(held * WORLD, WORLD), abs=8 * len(parameters))
        for gradient, other, parameter in zip(found, ranks[0][0], parameters, strict=True):
            assert torch.equal(gradient, other)
            assert gradient.stride() == parameter.stride()
            assert torch.allclose(gradient, parameter.grad, rtol=1e-12, atol=1e-12)  # type: ignore[arg-type]


def test_a_gradient_that_one_rank_has_is_everybodys_and_one_that_nobody_has_stays_none() -> None:
    def step(communicator: Communicator, _: Any) -> tuple[list[bool], list[bool]]:
        used, unused = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(4))
        shard = ShardedReducer([used, unused], communicator, overlap=True)
        shard.begin_step()
        if communicator.rank == 1:
            (used * 0).sum().backward()
        shard.begin()
        shard.finish()
        found = [piece.value.grad is not None for piece in shard.pieces if piece.parameter is used]
        whole = shard.gathered_gradients()
        return found, [used in whole, unused in whole]

    ranks = run_on_threads(2, step, timeout_s=30)
    assert [each for found, _ in ranks for each in found] == [True]
    assert [whole for _, whole in ranks] == [[True, False]] * 2


def test_updated_slices_are_gathered() -> None:
    def step(communicator: Communicator, _: Any) -> list[Tensor]:
        net = copy_of_model()
        shard = ShardedReducer(net.parameters(), communicator, overlap=True, bucket_bytes=400)
        with torch.no_grad():
            for piece in shard.pieces:
                piece.value.add_(1)
        shard.gather_parameters()
        return [parameter.detach() for parameter in net.parameters()]

    for found in run_on_threads(WORLD, step, timeout_s=30):
        for parameter, before in zip(found, copy_of_model().parameters(), strict=True):
            assert torch.equal(parameter, before + 1)


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
        torch.manual_seed(2)
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
