"""One state for every strategy: what a plain module and a plain optimizer over its parameters would save and load."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from parallel.comm.communicator import Communicator
from parallel.comm.objects import gather_objects
from parallel.comm.thread_comm import run_on_threads
from parallel.engine import state_dict as full_state
from parallel.engine.engine import Engine
from parallel.space.team import Grid
from parallel.strategy import Strategy
from tests.helpers.engine_runs import LR, build, net, plain_of, train
from tests.helpers.plain_step import Batch
from tests.helpers.small_nets import batch_of

OPTIMIZERS: dict[str, Any] = {
    "adamw": functools.partial(torch.optim.AdamW, lr=LR, betas=(0.8, 0.95), weight_decay=0.1),
    "sgd": functools.partial(torch.optim.SGD, lr=LR, momentum=0.9),
}
STRATEGIES = {
    "1f1b": Strategy("1f1b", 3, 3, 4),
    "interleaved": Strategy("interleaved", 2, 2, 4, chunks=2),
    "pairs": Strategy("bidirectional", 3, 3, 4, zero=1),
    "groups of pairs": Strategy("master", 4, 2, 4, zero=1),
    "a team": Strategy("spatial", 2, 1, 4, grid=Grid(1, 2)),
    "teams": Strategy("1f1b", 4, 2, 4, grid=Grid(2, 1)),
}


NET = "two-outputs"


def steps_of(first: int, stop: int) -> list[Batch]:
    return [batch_of([1] * 4, 8, 50 + step, torch.float64) for step in range(first, stop)]


@functools.cache
def plain(optimizer: str, steps: int) -> dict[str, Any]:
    if not steps:
        model = net(NET, torch.float64)
        return {"model": model.state_dict(), "optimizer": OPTIMIZERS[optimizer](model.named_parameters()).state_dict()}
    found = plain_of(NET, steps_of(0, steps), OPTIMIZERS[optimizer])
    return {"model": found.model, "optimizer": found.optimizer}


def engine_of(communicator: Communicator, strategy: Strategy, optimizer: str) -> Engine:
    return build(communicator, NET, strategy, steps_of(0, 1), make_optimizer=OPTIMIZERS[optimizer])


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert list(found["model"]) == list(expected["model"])
    for key, value in expected["model"].items():
        torch.testing.assert_close(found["model"][key], value, rtol=1e-9, atol=1e-11)
    ours, theirs = found["optimizer"], expected["optimizer"]
    assert ours["param_groups"] == theirs["param_groups"]
    assert ours["state"].keys() == theirs["state"].keys()
    for number, state in theirs["state"].items():
        assert ours["state"][number].keys() == state.keys()
        for key, value in state.items():
            torch.testing.assert_close(ours["state"][number][key], value, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", STRATEGIES)
def test_what_is_gathered_is_what_the_plain_run_would_save(name: str, optimizer: str) -> None:
    def rank(communicator: Communicator, _: None) -> list[dict[str, Any]]:
        engine = engine_of(communicator, STRATEGIES[name], optimizer)
        fresh = copy.deepcopy(engine.state_dict())
        train(engine, steps_of(0, 2))
        return [fresh, engine.state_dict()]

    first, *others = run_on_threads(STRATEGIES[name].ranks, rank)
    assert others == [[{}, {}]] * (STRATEGIES[name].ranks - 1)
    assert_same(first[0], plain(optimizer, 0))  # before the first step there is no optimizer state
    assert_same(first[1], plain(optimizer, 2))


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
        train(engine, steps_of(0, 2))
        held = {key: value for stage in engine._work.stages.values() for key, value in stage.parameters.items()}
        return engine.state_dict(), {key: value.detach().clone() for key, value in held.items()}

    ranks = run_on_threads(strategy.ranks, rank)
    found = ranks[0][0]
    for _, held in ranks:  # whoever's copy it is
        assert all(torch.equal(found["model"][key], value) for key, value in held.items())
    parameters = set(dict(net(NET, torch.float64).named_parameters()))
    senders = [rank for rank in range(1, strategy.ranks) if parameters & sent[rank][0].keys() or sent[rank][1]]
    assert len(senders) == sending
    assert_same(found, plain("adamw", 2))


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_plain_checkpoint_is_continued(name: str) -> None:
    saved = plain("adamw", 2)

    def rank(communicator: Communicator, _: None) -> dict[str, Any]:
        engine = engine_of(communicator, STRATEGIES[name], "adamw")
        engine.load_state_dict(copy.deepcopy(saved))
        train(engine, steps_of(2, 4), 2)
        return engine.state_dict()

    assert_same(run_on_threads(STRATEGIES[name].ranks, rank)[0], plain("adamw", 4))


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
