"""One state for every strategy, that a plain module and optimizer would save and load; ZeRO's states, handed on."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from app.training.engines import build_engine
from parallel.comm.communicator import Communicator
from parallel.comm.objects import broadcast_object, gather_objects
from parallel.comm.thread_comm import run_on_threads
from parallel.engine import state_dict as full_state
from parallel.engine.engine import Engine
from parallel.engine.step import TrainingEngine
from parallel.memory.policy import ActivationPolicy
from parallel.space.team import TeamGrid
from parallel.strategy import Strategy
from tests.helpers.engine_runs import (
    CPU,
    LR,
    SEED,
    SGD,
    assert_same_state,
    build,
    net,
    on_threads,
    plain_of,
    steps_of,
    train,
)
from tests.helpers.plain_step import Batch
from tests.helpers.ranks import run_on_ranks
from tests.helpers.small_nets import NETS, batch_of
from tests.parallel.engine.test_exactness import CELLS, HOLDERS, RANKS, SHARDED, M

OPTIMIZERS: dict[str, Any] = {
    "adamw": functools.partial(torch.optim.AdamW, lr=LR, betas=(0.8, 0.95), weight_decay=0.1),
    "sgd": functools.partial(torch.optim.SGD, lr=LR, momentum=0.9),
}
STRATEGIES = {
    "1f1b": Strategy("1f1b", 3, 3, 4),
    "interleaved": Strategy("interleaved", 2, 2, 4, chunks=2),
    "pairs": Strategy("bidirectional", 3, 3, 4, zero=1),
    "groups of pairs": Strategy("master", 4, 2, 4, zero=1),
    "a team": Strategy("spatial", 2, 1, 4, grid=TeamGrid(1, 2)),
    "teams": Strategy("1f1b", 4, 2, 4, grid=TeamGrid(2, 1)),
}
NET = "two-outputs"


def small_steps(first: int, stop: int) -> list[Batch]:
    return [batch_of([1] * 4, 8, 50 + step, torch.float64) for step in range(first, stop)]


@functools.cache
def plain(optimizer: str, steps: int) -> dict[str, Any]:
    if not steps:
        model = net(NET, torch.float64)
        return {"model": model.state_dict(), "optimizer": OPTIMIZERS[optimizer](model.named_parameters()).state_dict()}
    found = plain_of(NET, small_steps(0, steps), OPTIMIZERS[optimizer])
    return {"model": found.model, "optimizer": found.optimizer}


def engine_of(communicator: Communicator, strategy: Strategy, optimizer: str) -> Engine:
    return build(communicator, NET, strategy, small_steps(0, 1), make_optimizer=OPTIMIZERS[optimizer])


@pytest.mark.parametrize(("name", "optimizer"), [*((name, "adamw") for name in STRATEGIES), ("pairs", "sgd")])
def test_what_is_gathered_is_what_the_plain_run_would_save(name: str, optimizer: str) -> None:
    def rank(communicator: Communicator, _: None) -> list[dict[str, Any]]:
        engine = engine_of(communicator, STRATEGIES[name], optimizer)
        fresh = copy.deepcopy(engine.state_dict())
        train(engine, small_steps(0, 2))
        return [fresh, engine.state_dict()]

    first, *others = run_on_threads(STRATEGIES[name].ranks, rank)
    assert others == [[{}, {}]] * (STRATEGIES[name].ranks - 1)
    assert_same_state(first[0], plain(optimizer, 0))  # before the first step there is no optimizer state
    assert_same_state(first[1], plain(optimizer, 2))


COPIES = {
    "all": (Strategy("master", 2, 2, 4), 0),
    "the first and the last stage": (Strategy("bidirectional", 4, 4, 4), 2),
    "all, but divided state": (Strategy("master", 2, 2, 4, zero=1), 1),
    "none": (Strategy("gpipe", 2, 2, 4), 1),
    "all, in two groups": (Strategy("master", 4, 2, 4), 0),
}


@pytest.mark.parametrize("name", COPIES)
def test_first_rank_is_sent_no_copy_of_what_it_has(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    strategy, sending = COPIES[name]
    sent: dict[int, Any] = {}

    def gather(communicator: Communicator, value: Any) -> list[Any] | None:
        sent[communicator.rank] = value
        return gather_objects(communicator, value)

    monkeypatch.setattr(full_state, "gather_objects", gather)

    def rank(communicator: Communicator, _: None) -> Any:
        engine = engine_of(communicator, strategy, "adamw")
        train(engine, small_steps(0, 2))
        held = {key: value for stage in engine._work.stages.values() for key, value in stage.parameters.items()}
        return engine.state_dict(), {key: value.detach().clone() for key, value in held.items()}

    ranks = run_on_threads(strategy.ranks, rank)
    found = ranks[0][0]
    for _, held in ranks:  # whoever's copy it is
        assert all(torch.equal(found["model"][key], value) for key, value in held.items())
    parameters = set(dict(net(NET, torch.float64).named_parameters()))
    senders = [rank for rank in range(1, strategy.ranks) if parameters & sent[rank][0].keys() or sent[rank][1]]
    assert len(senders) == sending
    assert_same_state(found, plain("adamw", 2))


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_plain_checkpoint_is_continued(name: str) -> None:
    saved = plain("adamw", 2)

    def rank(communicator: Communicator, _: None) -> dict[str, Any]:
        engine = engine_of(communicator, STRATEGIES[name], "adamw")
        engine.load_state_dict(copy.deepcopy(saved))
        train(engine, small_steps(2, 4), 2)
        return engine.state_dict()

    assert_same_state(run_on_threads(STRATEGIES[name].ranks, rank)[0], plain("adamw", 4))


def test_state_of_a_plain_optimizer_follows_its_names_and_several_groups_need_them() -> None:
    first, last = (torch.nn.Parameter(torch.zeros(1)) for _ in range(2))
    plain = torch.optim.SGD([{"params": [("last", last)]}, {"params": [("first", first)]}], momentum=0.9)
    for number, parameter in enumerate((first, last)):
        plain.state[parameter]["momentum_buffer"] = torch.tensor([float(number)])
    own = torch.optim.SGD([("first", first), ("last", last)], momentum=0.9)
    state = full_state.own_state(own, plain.state_dict(), ["first", "last"])["state"]
    assert [state[number]["momentum_buffer"].item() for number in range(2)] == [0.0, 1.0]
    with pytest.raises(ValueError, match="optimizer lacks first"):
        full_state.own_state(own, torch.optim.SGD([("last", last)]).state_dict(), ["first", "last"])
    unnamed = torch.optim.SGD([{"params": [last]}, {"params": [first]}])
    with pytest.raises(ValueError, match="2 groups without param_names"):
        full_state.own_state(own, unnamed.state_dict(), ["first", "last"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.pop("late.bias"), "1 names .*late.bias"),
        (lambda state: state.update(more=torch.zeros(1)), "1 names .*more"),
        (
            lambda state: [state.pop(key) for key in [*state] if key.startswith("body")],
            "6 names .*body.1.bias.*--model",
        ),
    ],
    ids=["missing", "strange", "many"],
)
def test_a_checkpoint_of_another_model_is_refused_by_name(change: Callable[[Any], Any], message: str) -> None:
    saved = copy.deepcopy(plain("sgd", 0))
    change(saved["model"])

    def rank(communicator: Communicator, _: None) -> None:
        engine_of(communicator, STRATEGIES["1f1b"], "sgd").load_state_dict(saved)

    with pytest.raises(ValueError, match=message):
        run_on_threads(3, rank)


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


KINDS = {
    "single": Strategy("single", 1, 1, M),
    "ddp": HOLDERS["ddp"],
    "ddp, parameters on the host": dataclasses.replace(HOLDERS["ddp"], policy=ActivationPolicy(parameters=True)),
    **{name: CELLS[name] for name in ("ddp, zero 1, keep", "ddp, zero 2, host", "master, zero 1, keep")},
    "ddp, zero 2, parameters": CELLS["ddp, zero 2, parameters"],
    **{name: CELLS[name] for name in ("1f1b, zero 2, keep", "spatial, zero 2, keep")},
}


def test_each_kind_goes_on_from_the_checkpoint_of_another() -> None:
    """A step under each is a step of a plain run: what is saved is the state of a plain module, whoever loads it."""
    steps, state = steps_of(M, steps=len(KINDS)), dict[str, Any]()

    def rank(communicator: Communicator, _: None, strategy: Strategy, number: int) -> dict[str, Any]:
        engine = built(communicator, strategy, ADAM)
        if number:
            engine.load_state_dict(copy.deepcopy(state))
        train(engine, steps[number : number + 1], first=number)
        return engine.state_dict()

    for number, strategy in enumerate(KINDS.values()):
        step = functools.partial(rank, strategy=strategy, number=number)
        state = run_on_threads(strategy.ranks, step, timeout_s=60)[0]
    assert_same_state(state, continued(len(KINDS)))


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
