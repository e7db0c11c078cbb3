"""Asynchronous SGD: what one worker, rounds and replays give, and who waits for whom."""

from __future__ import annotations

import copy
import functools
import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parallel.comm.communicator import Communicator
from parallel.comm.thread_comm import LocalCommunicator, run_on_threads
from parallel.engine.async_engine import AsyncEngine
from parallel.engine.optimizer_step import keep_average
from parallel.engine.step import Microbatch, NonFiniteLoss, microbatch_seed
from parallel.memory.policy import ActivationPolicy
from parallel.schedule.action import Schedule
from parallel.schedule.shares import consecutive
from parallel.schedule.text import Push, PushRule
from parallel.strategy import Strategy
from tests.helpers.engine_runs import LR, SEED, build, net, steps_of
from tests.helpers.plain_step import Batch, largest_error
from tests.helpers.ranks import run_on_ranks
from tests.helpers.small_nets import ALL_NETS

KEEP = ActivationPolicy()
PLAIN_SGD = functools.partial(torch.optim.SGD, lr=LR)
ADAMW = functools.partial(torch.optim.AdamW, lr=LR)
OPTIMIZERS = {"sgd": PLAIN_SGD, "momentum": functools.partial(torch.optim.SGD, lr=LR, momentum=0.9), "adamw": ADAMW}
REPLAYED = [("momentum", "threads"), ("adamw", "threads"), ("momentum", "forked"), ("adamw", "mpi")]
REPLAYED[2:] = [pytest.param(*each, marks=pytest.mark.process) for each in REPLAYED[2:]]
ROUNDS = [("threads", 2), ("threads", 3), pytest.param("forked", 2, marks=pytest.mark.process)]


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def async_strategy(ranks: int, m: int, staleness: int = 4, **more: Any) -> Strategy:
    rule = PushRule(staleness, more.pop("by_staleness", False), more.pop("replayed", ()))
    return Strategy("async", ranks, 1, m, pushes=rule, **more)


def fed(engine: AsyncEngine, batch: Batch) -> Iterator[Microbatch]:
    return (Microbatch(*batch[i], tuple(batch[i][0].shape)) for i in engine.share)


def trained(communicator: Communicator, argument: dict[str, Any], policy: ActivationPolicy = KEEP) -> dict[str, Any]:
    torch.set_num_threads(1)  # as ranks that are processes: sums round by the number of threads
    given = {"net": "skips", "optimizer": "sgd", "steps": 3, "staleness": 4, "by_staleness": False} | argument
    steps = steps_of(given["m"], getattr(torch, given["dtype"]), given["steps"])
    how = {name: given[name] for name in ("m", "staleness", "by_staleness")}
    how |= {"policy": policy, "replayed": tuple(Push(*push) for push in given.get("replayed", ()))}
    how |= {"shares": consecutive(given["shares"])} if "shares" in given else {}
    make = OPTIMIZERS[given["optimizer"]]
    engine = build(communicator, given["net"], async_strategy(communicator.world, **how), steps, make_optimizer=make)
    results = [engine.step(fed(engine, batch), number, LR) for number, batch in enumerate(steps)]
    return {
        "losses": [result.loss for result in results],
        "tiles": [result.tiles for result in results],
        "pushes": [list(push) for result in results for push in result.pushes],
        "state": engine.state_dict(),
        "own": {name: p.detach().clone() for name, p in engine._work.stages[0].parameters.items()},
    }


def on_ranks(world: int, folder: Path, launcher: Any, argument: dict[str, Any]) -> list[dict[str, Any]]:
    ranks: list[dict[str, Any]] = run_on_ranks(world, f"{__name__}:trained", folder, argument, launcher=launcher)
    return ranks


def minibatch_run(name: str, make: Callable[..., Any], steps: list[Batch], round_size: int = 1) -> dict[str, Any]:
    """Written out: an update after every minibatch, or after the mean gradient of every round, of ``len / round_size``
    consecutive minibatches each worker."""
    model, loss = net(name, steps[0][0][0].dtype).train(), ALL_NETS[name][1]
    optimizer = make(model.named_parameters())
    losses = []
    for step, batch in enumerate(steps):
        each = len(batch) // round_size
        total = 0.0
        for k in range(each):
            optimizer.zero_grad()
            for i in range(k, len(batch), each):
                torch.manual_seed(microbatch_seed(SEED, step, i))
                part = loss(model(batch[i][0]), batch[i][1])
                (part / round_size).backward()
                total += part.item() / len(batch)
            optimizer.step()
        losses.append(total)
    return {"losses": losses, "model": model.state_dict(), "optimizer": optimizer.state_dict()}


def assert_same_bits(expected: dict[str, Tensor], found: dict[str, Tensor]) -> None:
    assert expected.keys() == found.keys()
    assert [name for name in expected if not torch.equal(expected[name], found[name])] == []


def states(optimizer: dict[str, Any]) -> dict[str, Tensor]:
    values = {f"{n}.{key}": v for n, state in optimizer["state"].items() for key, v in state.items()}
    return {name: value for name, value in values.items() if isinstance(value, Tensor)}


@pytest.mark.pairs
@pytest.mark.parametrize("by_staleness", [False, True])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", ["skips", "two-outputs"])
def test_one_worker_is_the_plain_run_bit_for_bit(name: str, optimizer: str, by_staleness: bool) -> None:
    """Recomputed or not."""
    policy = ActivationPolicy("block" if by_staleness else "none")
    argument = {"dtype": "float32", "m": 4, "net": name, "optimizer": optimizer, "by_staleness": by_staleness}
    ours = trained(LocalCommunicator(), argument, policy)
    plain = minibatch_run(name, OPTIMIZERS[optimizer], steps_of(4, torch.float32, 3))
    assert_same_bits(plain["model"], ours["state"]["model"])
    assert_same_bits(states(plain["optimizer"]), states(ours["state"]["optimizer"]))
    assert ours["losses"] == pytest.approx(plain["losses"], rel=1e-6)
    assert {(push[5], push[6]) for push in ours["pushes"]} == {(0, LR)}


@pytest.mark.parametrize(("launcher", "world"), ROUNDS)
def test_rounds_are_synchronous_training(world: int, launcher: str, tmp_path: Path) -> None:
    """S = 0 with SGD: each round of W minibatches is a step of their mean gradient."""
    argument = {"dtype": "float64", "m": 2 * world, "staleness": 0}
    ranks = on_ranks(world, tmp_path, launcher, argument)
    plain = minibatch_run("skips", PLAIN_SGD, steps_of(2 * world, torch.float64, 3), world)
    for rank in ranks:
        assert rank["losses"] == pytest.approx(plain["losses"], rel=1e-10)
        assert_same_bits(ranks[0]["own"], rank["own"])
        assert largest_error({name: plain["model"][name] for name in rank["own"]}, rank["own"]) <= 1e-10
        assert rank["tiles"] == 3 * [4]  # two minibatches of two tiles each
    pushes = [Push(*push) for push in ranks[0]["pushes"]]
    assert [push.staleness for push in pushes] == 6 * list(range(world))
    assert not any(rank["pushes"] for rank in ranks[1:])


@pytest.mark.parametrize(("optimizer", "launcher"), REPLAYED)
def test_the_log_of_pushes_replays_bit_for_bit(optimizer: str, launcher: str, tmp_path: Path) -> None:
    argument = {"dtype": "float32", "m": 6, "optimizer": optimizer, "shares": [4, 2], "by_staleness": True}
    ran = on_ranks(2, tmp_path, launcher, argument)[0]
    del argument["shares"]
    again = trained(LocalCommunicator(), argument | {"replayed": ran["pushes"]})
    assert again["losses"] == ran["losses"]
    assert again["pushes"] == ran["pushes"]
    assert_same_bits(ran["state"]["model"], again["state"]["model"])
    assert_same_bits(states(ran["state"]["optimizer"]), states(again["state"]["optimizer"]))
    shifted = [[*push[:3], 5 - push[3], *push[4:]] for push in ran["pushes"]]
    other = trained(LocalCommunicator(), argument | {"replayed": shifted})
    assert not torch.equal(other["own"]["head.weight"], again["own"]["head.weight"])  # the order says something


@pytest.mark.parametrize("staleness", [0, 3, 100])
def test_a_slow_worker_is_waited_for_by_the_bound_and_no_longer(staleness: int) -> None:
    """Worker 1 has no first minibatch until worker 0 has come as far as the bound allows, and stays there."""
    m, steps = 12, steps_of(12, torch.float32, 1)
    allowed = min(staleness + 1, m // 2)
    seen: list[int] = []
    engines: dict[int, AsyncEngine] = {}

    def late(engine: AsyncEngine, pushes: Callable[[], int]) -> Iterator[Microbatch]:
        end_s = time.monotonic() + 20
        while pushes() < allowed and time.monotonic() < end_s:
            time.sleep(0.002)
        time.sleep(0.05)
        seen.append(pushes())
        yield from fed(engine, steps[0])

    def run(communicator: Communicator, _: None) -> list[Push]:
        engine = build(communicator, "skips", async_strategy(2, m, staleness), steps, make_optimizer=PLAIN_SGD)
        engines[communicator.rank] = engine
        communicator.barrier()
        server = engines[0]._server
        tiles = late(engine, lambda: len(server.pushes)) if communicator.rank else fed(engine, steps[0])
        return list(engine.step(tiles, 0, LR).pushes)

    pushes = run_on_threads(2, run)[0]
    assert seen == [allowed]
    assert [push.worker for push in pushes[:allowed]] == [0] * allowed
    assert next(push for push in pushes if push.worker == 1).staleness == allowed
    assert sorted(push.minibatch for push in pushes) == list(range(m))
    argument = {"dtype": "float32", "m": 12, "staleness": min(staleness, 2), "by_staleness": True, "steps": 2}
    for push in (Push(*each) for each in run_on_threads(3, trained, argument)[0]["pushes"]):
        assert push.staleness == push.push - push.pulled <= 2 * (2 * min(staleness, 2) + 1)
        assert push.learning_rate == LR / (1 + push.staleness)


def test_a_watchdog_knows_when_a_worker_waits() -> None:
    """A rank that waits for another is given up later than one that computes."""
    steps = steps_of(2, torch.float32, 1)
    seen: list[int] = []

    class Watch:
        def follow(self, schedule: Schedule) -> None:
            assert [str(action) for action in schedule[0]] == ["0F0", "0B0", "0F1", "0B1"]

        def at(self, position: int, waiting: bool = False, shapes: str = "") -> None:
            if seen[-1:] != [position]:
                seen.append(position)

    strategy = async_strategy(1, 2)
    engine = build(LocalCommunicator(), "skips", strategy, steps, make_optimizer=PLAIN_SGD, observer=Watch())
    engine.step(fed(engine, steps[0]), 0, LR)
    assert seen == [-1, 0, 1, -1, 2, 3, -1]  # pull, forward, backward, push and pull, ..., drain


def test_shares_change_between_steps() -> None:
    steps = steps_of(6, torch.float32, 2)

    def run(communicator: Communicator, _: None) -> list[tuple[int, int]]:
        strategy = async_strategy(2, 6, shares=consecutive((5, 1)))
        engine = build(communicator, "skips", strategy, steps, make_optimizer=PLAIN_SGD)
        first = engine.step(fed(engine, steps[0]), 0, LR)
        engine.reshare(consecutive((2, 4)))
        second = engine.step(fed(engine, steps[1]), 1, LR)
        assert [i for i, _ in second.seconds] == list(engine.share)
        return [(push.step, push.worker) for push in (*first.pushes, *second.pushes)]

    workers = run_on_threads(2, run)[0]
    assert {each: workers.count(each) for each in workers} == {(0, 0): 5, (0, 1): 1, (1, 0): 2, (1, 1): 4}


def test_a_loss_that_is_not_finite_updates_nothing_and_ends_every_rank() -> None:
    steps = steps_of(4, torch.float32, 1)
    steps[0][3][0][0, 0, 0, 0] = float("nan")

    def run(communicator: Communicator, _: None) -> dict[str, Tensor]:
        engine = build(communicator, "two-outputs", async_strategy(2, 4), steps, make_optimizer=PLAIN_SGD)
        with pytest.raises(NonFiniteLoss) as caught:
            engine.step(fed(engine, steps[0]), 0, LR)
        assert caught.value.microbatches == [3]
        return dict(engine._work.stages[0].parameters)

    for parameters in run_on_threads(2, run):
        assert all(parameter.isfinite().all() for parameter in parameters.values())


def test_a_lost_worker_ends_the_step_of_all() -> None:
    steps = steps_of(6, torch.float32, 1)

    def run(communicator: Communicator, _: None) -> None:
        def dying() -> Iterator[Microbatch]:
            yield from itertools.islice(fed(engine, steps[0]), 1)
            raise OSError("worker 2 is gone")

        engine = build(communicator, "skips", async_strategy(3, 6), steps, make_optimizer=PLAIN_SGD)
        engine.step(dying() if communicator.rank == 2 else fed(engine, steps[0]), 0, LR)

    with pytest.raises(OSError, match="worker 2 is gone"):
        run_on_threads(3, run, timeout_s=20)


def test_parameters_frozen_after_assembly_are_refused_by_name() -> None:
    steps = steps_of(2, torch.float32, 1)
    engine = build(LocalCommunicator(), "skips", async_strategy(1, 2), steps, make_optimizer=PLAIN_SGD)
    engine._work.stages[0].parameters["head.weight"].requires_grad_(False)
    with pytest.raises(ValueError, match=r"requires_grad of head\.weight is False"):
        engine.step(fed(engine, steps[0]), 0, LR)


@pytest.mark.parametrize("world", [1, 2])
def test_a_checkpoint_goes_on_bit_for_bit_and_averages_are_exchanged_on_all_ranks(world: int) -> None:
    steps = steps_of(4, torch.float32, 3)

    def make(parameters: Any) -> Any:
        optimizer = ADAMW(parameters)
        keep_average(optimizer, 0.5)
        return optimizer

    def run(communicator: Communicator, _: None) -> Tensor:
        engine, fresh = (
            build(communicator, "skips", async_strategy(world, 4, 0), steps, make_optimizer=make) for _ in range(2)
        )
        model: nn.Module = engine._work.stages[0].module
        for number in range(2):
            engine.step(fed(engine, steps[number]), number, LR)
        before = copy.deepcopy(model.state_dict())
        with engine.averaged():
            averaged = model.state_dict()["head.weight"].clone()
        assert_same_bits(before, model.state_dict())
        assert not torch.equal(averaged, before["head.weight"])
        if world == 1:
            fresh.load_state_dict(copy.deepcopy(engine.state_dict()))
            for each in (engine, fresh):
                each.step(fed(each, steps[2]), 2, LR)
            assert_same_bits(engine.state_dict()["model"], fresh.state_dict()["model"])
        return averaged

    ranks = run_on_threads(world, run)
    assert torch.equal(ranks[0], ranks[-1])
