"""ZeRO stages 1 to 3 hand their states to each other and to any strategy, and give the bits of whole sums."""

from __future__ import annotations

import copy
import dataclasses
import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from app.training.engines import build_engine
from parallel.comm.communicator import Communicator
from parallel.comm.objects import broadcast_object
from parallel.comm.thread_comm import run_on_threads
from parallel.engine.step import TrainingEngine
from parallel.memory.policy import ActivationPolicy
from parallel.strategy import Strategy
from tests.helpers.engine_runs import CPU, LR, SEED, SGD, net, on_threads, plain_of, steps_of, train
from tests.helpers.plain_step import largest_error
from tests.helpers.ranks import run_on_ranks
from tests.helpers.small_nets import NETS
from tests.parallel.engine.test_exactness import CELLS, HOLDERS, RANKS, SHARDED, M

# A large epsilon: without, Adam's first updates are signs of gradients, even of those that are rounding.
ADAM = functools.partial(torch.optim.AdamW, lr=LR, weight_decay=1e-2, eps=1e-3)


def built(communicator: Communicator, strategy: Strategy, make: Any = SGD) -> TrainingEngine:
    model, loss = net("skips", torch.float64), NETS["skips"][1]
    return build_engine(strategy, model, loss, make, communicator, batch=2 * M, tile=12, seed=SEED, device=CPU)


def passed_on(communicator: Communicator, _: None) -> dict[str, Any]:
    """A step under each strategy, from what the one before it left; returns the last state."""
    state: dict[str, Any] = {}
    for step, (strategy, batch) in enumerate(zip(PASSED, steps_of(M, steps=len(PASSED)), strict=True)):
        engine = built(communicator, strategy, ADAM)
        if state:
            engine.load_state_dict(copy.deepcopy(state))
        train(engine, [batch], first=step)
        state = broadcast_object(communicator, engine.state_dict())
    return state


PASSED = (
    CELLS["ddp, zero 2, keep"],
    SHARDED["fsdp, keep"],
    CELLS["master, zero 1, host"],
    SHARDED["fsdp, host"],
    CELLS["spatial, zero 2, recompute"],
)


@pytest.mark.process
def test_states_pass_between_stages_1_2_and_3(tmp_path: Path) -> None:
    ranks = run_on_ranks(RANKS, f"{__name__}:passed_on", tmp_path)
    assert_same_state(ranks[0], continued(len(PASSED)))


def continued(steps: int) -> dict[str, Any]:
    run = plain_of("skips", steps_of(M, steps=steps), ADAM)
    return {"model": run.model, "optimizer": run.optimizer}


def assert_same_state(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert largest_error(expected["model"], found["model"]) <= 1e-9
    ours, theirs = found["optimizer"], expected["optimizer"]
    assert ours["param_groups"] == theirs["param_groups"]
    assert ours["state"].keys() == theirs["state"].keys()
    for number, values in theirs["state"].items():
        assert ours["state"][number].keys() == values.keys()
        assert largest_error(values, ours["state"][number]) <= 1e-9


KINDS = {
    "single": Strategy("single", 1, 1, M),
    "ddp": HOLDERS["ddp"],
    "ddp, parameters on the host": dataclasses.replace(HOLDERS["ddp"], policy=ActivationPolicy(parameters=True)),
    **{name: CELLS[name] for name in ("ddp, zero 1, keep", "ddp, zero 2, host", "master, zero 1, keep")},
    "ddp, zero 2, parameters": CELLS["ddp, zero 2, parameters"],
    **{name: CELLS[name] for name in ("1f1b, zero 2, keep", "spatial, zero 2, keep")},
}


@pytest.mark.parametrize(
    "first", [pytest.param(name, marks=() if "2, host" in name else pytest.mark.long) for name in KINDS]
)
def test_checkpoints_of_every_kind_load_into_every_other(first: str) -> None:
    """Two steps under one and one under another are three of a plain run."""
    steps = steps_of(M, steps=3)

    def part(communicator: Communicator, saved: dict[str, Any] | None, strategy: Strategy) -> dict[str, Any]:
        engine = built(communicator, strategy, ADAM)
        if saved is not None:
            engine.load_state_dict(copy.deepcopy(saved))
        train(engine, steps[2:] if saved else steps[:2], first=2 if saved else 0)
        return engine.state_dict()

    def run(strategy: Strategy, saved: dict[str, Any] | None = None) -> dict[str, Any]:
        return run_on_threads(strategy.ranks, functools.partial(part, strategy=strategy), saved, timeout_s=60)[0]

    saved = run(KINDS[first])
    assert_same_state(saved, continued(2))
    for strategy in KINDS.values():
        assert_same_state(run(strategy, saved), continued(3))


@pytest.mark.parametrize(("name", "zero"), [("ddp", 1), ("ddp", 2), ("master", 1), ("spatial", 1)])
def test_bits_are_those_of_whole_sums_where_each_rank_sums_once(name: str, zero: int) -> None:
    m = RANKS if name == "ddp" else M
    strategies = (dataclasses.replace(HOLDERS[name], m=m, zero=each) for each in (0, zero))
    whole, divided = (on_threads("skips", strategy, steps_of(m)) for strategy in strategies)
    for one, other in zip(whole, divided, strict=True):
        assert one["losses"] == other["losses"]
        assert all(torch.equal(gradient, other["gradients"][key]) for key, gradient in one["gradients"].items())
    states = [ranks[0]["state"] for ranks in (whole, divided)]
    assert all(torch.equal(value, states[1]["model"][key]) for key, value in states[0]["model"].items())
    for one, other in zip(*(state["optimizer"]["state"].values() for state in states), strict=True):
        assert torch.equal(one["momentum_buffer"], other["momentum_buffer"])
