"""One rank's optimizer step: over what it owns, scaled when asked."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

from parallel.comm.communicator import Communicator
from parallel.comm.sharded_reducer import ShardedReducer
from parallel.comm.thread_comm import run_on_threads
from parallel.engine.optimizer_step import OptimizerStep

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


def test_an_optimizer_that_may_need_whole_parameters_is_refused() -> None:
    class Lars(torch.optim.SGD):
        """Scales the gradient of each parameter by the norms of both."""

    def rank(communicator: Communicator, _: None) -> None:
        weight = nn.Parameter(torch.ones(4))
        shard = ShardedReducer([weight], communicator, overlap=False)
        (piece,) = shard.pieces
        pieces = {"weight": piece}
        OptimizerStep(
            functools.partial(Lars, lr=0.1),
            owned={name: piece.value for name, piece in pieces.items()},
            unshared=[],
            held=[weight],
            pieces=pieces,
            shards=[shard],
        )

    with pytest.raises(ValueError, match="Lars may need whole ones: use one of SGD, Adam, AdamW, RMSprop, or --zero 0"):
        run_on_threads(2, rank, None)
