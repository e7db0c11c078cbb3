"""One state for every strategy: what a plain module and a plain optimizer over its parameters would save and load."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from parallel.build import assemble
from parallel.comm.communicator import Communicator
from parallel.comm.objects import gather_objects
from parallel.comm.thread_comm import run_on_threads
from parallel.engine import state_dict as full_state
from parallel.engine.engine import Engine
from parallel.engine.step import Microbatch, microbatch_seed
from parallel.space.team import Grid
from parallel.strategy import Strategy
from tests.helpers.small_nets import TwoOutputs, batch_of, drawn_once, two_losses

SEED, LR = 4, 0.02
OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], Optimizer]] = {
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


def model() -> nn.Module:
    return drawn_once("canonical", 8, lambda: TwoOutputs().double())


def batch(step: int) -> list[tuple[Tensor, Tensor]]:
    return batch_of([1] * 4, 8, 50 + step, torch.float64)


def train_plain(net: nn.Module, optimizer: Optimizer, steps: range) -> None:
    net.train()
    for step in steps:
        optimizer.zero_grad()
        for i, (images, targets) in enumerate(batch(step)):
            torch.manual_seed(microbatch_seed(SEED, step, i))
            (two_losses(net(images), targets) / 4).backward()
        optimizer.step()


def plain(optimizer_name: str, steps: int) -> dict[str, Any]:
    net = model()
    optimizer = OPTIMIZERS[optimizer_name](net.named_parameters())
    train_plain(net, optimizer, range(steps))
    return copy.deepcopy({"model": net.state_dict(), "optimizer": optimizer.state_dict()})


def build(communicator: Communicator, strategy: Strategy, optimizer: str) -> Engine:
    return assemble(
        model(),
        two_losses,
        OPTIMIZERS[optimizer],
        communicator,
        strategy,
        shape=(1, 3, 8, 8),
        batch=4,
        device=torch.device("cpu"),
        seed=SEED,
    )


def train(engine: Engine, steps: range) -> None:
    for step in steps:
        tiles = batch(step)
        mine = [
            Microbatch(tiles[i][0] if wants.images else None, tiles[i][1] if wants.targets else None, (1, 3, 8, 8))
            for i in engine.share
            for wants in [engine.wants(i)]
        ]
        engine.step(mine, step, LR)


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
    def rank(communicator: Communicator, _: None) -> dict[str, Any]:
        engine = build(communicator, STRATEGIES[name], optimizer)
        train(engine, range(2))
        return engine.state_dict()

    states = run_on_threads(STRATEGIES[name].ranks, rank)
    assert states[1:] == [{}] * (STRATEGIES[name].ranks - 1)
    assert_same(states[0], plain(optimizer, 2))


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
        engine = build(communicator, strategy, "adamw")
        train(engine, range(2))
        held = {key: value for stage in engine._work.stages.values() for key, value in stage.parameters.items()}
        return engine.state_dict(), {key: value.detach().clone() for key, value in held.items()}

    ranks = run_on_threads(strategy.ranks, rank)
    found = ranks[0][0]
    for _, held in ranks:  # whoever's copy it is
        assert all(torch.equal(found["model"][key], value) for key, value in held.items())
    parameters = set(dict(model().named_parameters()))
    senders = [rank for rank in range(1, strategy.ranks) if parameters & sent[rank][0].keys() or sent[rank][1]]
    assert len(senders) == sending
    assert_same(found, plain("adamw", 2))


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_plain_checkpoint_is_continued(name: str) -> None:
    saved = plain("adamw", 2)

    def rank(communicator: Communicator, _: None) -> dict[str, Any]:
        engine = build(communicator, STRATEGIES[name], "adamw")
        engine.load_state_dict(copy.deepcopy(saved))
        train(engine, range(2, 4))
        return engine.state_dict()

    assert_same(run_on_threads(STRATEGIES[name].ranks, rank)[0], plain("adamw", 4))


def test_a_plain_run_continues_what_a_strategy_saved() -> None:
    def rank(communicator: Communicator, _: None) -> dict[str, Any]:
        engine = build(communicator, STRATEGIES["pairs"], "adamw")
        train(engine, range(2))
        return engine.state_dict()

    saved = run_on_threads(3, rank)[0]
    net = model()
    optimizer = OPTIMIZERS["adamw"](net.named_parameters())
    net.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    train_plain(net, optimizer, range(2, 4))
    assert_same({"model": net.state_dict(), "optimizer": optimizer.state_dict()}, plain("adamw", 4))


def test_before_the_first_step_there_is_no_optimizer_state() -> None:
    def rank(communicator: Communicator, _: None) -> dict[str, Any]:
        return build(communicator, STRATEGIES["groups of pairs"], "adamw").state_dict()

    assert_same(run_on_threads(4, rank)[0], plain("adamw", 0))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.pop("late.bias"), "1 names are in one of the two only, such as late.bias;"),
        (lambda state: state.update(more=torch.zeros(1)), "1 names are in one of the two only, such as more;"),
        (
            lambda state: [state.pop(key) for key in [key for key in state if key.startswith("body")]],
            "6 names .* such as body.0.weight, body.1.bias, body.1.num_batches_tracked; use the --model",
        ),
    ],
    ids=["missing", "strange", "many"],
)
def test_a_checkpoint_of_another_model_is_refused_by_name(change: Callable[[Any], Any], message: str) -> None:
    saved = plain("sgd", 0)
    change(saved["model"])

    def rank(communicator: Communicator, _: None) -> None:
        build(communicator, STRATEGIES["1f1b"], "sgd").load_state_dict(saved)

    with pytest.raises(ValueError, match=message):
        run_on_threads(3, rank)
