"""One rank's optimizer step: over what it owns, scaled when asked, copied to the other rank of a pair."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn

from parallel.comm.communicator import Communicator
from parallel.comm.thread_comm import run_on_threads
from parallel.engine.optimizer_step import OptimizerStep, ParamBroadcast

SGD = functools.partial(torch.optim.SGD, lr=99.0)
"""With a rate that every step replaces."""


def parameter(value: float, gradient: float | None = None) -> nn.Parameter:
    made = nn.Parameter(torch.tensor([value]))
    made.grad = None if gradient is None else torch.tensor([gradient])
    return made


def test_a_step_uses_the_learning_rate_it_is_given() -> None:
    weight = parameter(1.0, 2.0)
    update = OptimizerStep(SGD, owned={"weight": weight}, unshared=[], held=[weight])
    update.apply(0.25, scale=1)
    assert weight.item() == 0.5
    update.apply(0.125, scale=1)
    assert weight.item() == 0.25


def test_all_gradients_held_are_scaled_also_those_another_rank_updates() -> None:
    own, other, without = parameter(1.0, 2.0), parameter(1.0, 4.0), parameter(1.0)
    update = OptimizerStep(SGD, owned={"own": own, "without": without}, unshared=[], held=[own, other, without])
    update.apply(0.5, scale=0.5)
    assert (own.grad, other.grad, without.grad) == (torch.tensor([1.0]), torch.tensor([2.0]), None)
    assert [own.item(), other.item(), without.item()] == [0.5, 1.0, 1.0]


def test_gradients_that_stay_on_this_rank_begin_at_nothing() -> None:
    """A parameter that no microbatch reaches has none, and is passed over as in a single process."""
    alone, shared = parameter(1.0, 2.0), parameter(1.0, 3.0)
    view = shared.grad
    update = OptimizerStep(SGD, owned={"alone": alone, "shared": shared}, unshared=[alone], held=[alone, shared])
    update.begin_step()
    assert alone.grad is None
    assert shared.grad is view, "its exchange has put it there and zeroes it"


def test_a_rank_that_owns_nothing_has_no_optimizer_and_takes_the_copies() -> None:
    def rank(communicator: Communicator, source: int) -> tuple[bool, float, float]:
        weight, fixed = parameter(1.0 + communicator.rank, 2.0), parameter(5.0)
        owns = communicator.rank == source
        copies = [ParamBroadcast([weight], communicator, source)]
        update = OptimizerStep(SGD, owned={"weight": weight} if owns else {}, unshared=[], held=[weight], copies=copies)
        update.apply(0.25, scale=1)
        return update.optimizer is not None, weight.item(), fixed.item()

    assert run_on_threads(2, rank, 0) == [(True, 0.5, 5.0), (False, 0.5, 5.0)]
    assert run_on_threads(2, rank, 1) == [(False, 1.5, 5.0), (True, 1.5, 5.0)]


def test_a_pair_that_each_updates_half_ends_as_two_that_update_all() -> None:
    values, gradients = [1.0, -2.0, 3.0, 0.5], [0.1, 0.7, -0.3, 0.2]
    adam = functools.partial(torch.optim.AdamW, lr=99.0, weight_decay=0.1)

    def rank(communicator: Communicator, shard: bool) -> list[float]:
        weights = {str(k): parameter(value) for k, value in enumerate(values)}
        halves = [{k: weights[k] for k in keys} for keys in ("01", "23")]
        copies = [ParamBroadcast(list(half.values()), communicator, source) for source, half in enumerate(halves)]
        owned: dict[str, Any] = halves[communicator.rank] if shard else weights
        update = OptimizerStep(adam, owned=owned, unshared=[], held=weights.values(), copies=copies if shard else [])
        for step in range(3):
            for weight, gradient in zip(weights.values(), gradients, strict=True):
                weight.grad = torch.tensor([gradient * (step + 1)])
            update.apply(0.1, scale=1)
        assert update.optimizer is not None
        assert len(update.optimizer.state) == (2 if shard else 4)
        return [weight.item() for weight in weights.values()]

    sharded, whole = (run_on_threads(2, rank, shard) for shard in (True, False))
    assert sharded == whole
    assert sharded[0] == sharded[1] != pytest.approx(values)
