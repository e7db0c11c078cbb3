"""Transparency: every schedule on any mesh gives the losses, gradients and statistics of the plain step."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
import torch._inductor.config
from torch import nn

from parallel.comm.communicator import Communicator
from parallel.comm.local import LocalCommunicator
from parallel.comm.thread_comm import run_on_threads
from parallel.engine.step import EngineFault, Microbatch, NonFiniteLoss
from parallel.memory.policy import ActivationPolicy
from parallel.schedule.registry import SCHEDULES
from parallel.strategy import Strategy
from tests.helpers.engine_runs import (
    LR,
    SEED,
    SGD,
    assert_equal,
    build,
    net,
    on_threads,
    plain,
    run,
    steps_of,
    strategy_for,
    train,
)
from tests.helpers.plain_step import largest_error, plain_run
from tests.helpers.small_nets import ALL_NETS, NETS, batch_of, pixel_loss


@pytest.mark.pairs
@pytest.mark.parametrize("name", ALL_NETS)
@pytest.mark.parametrize("depth", [2, 3, 4])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_gives_the_plain_step(schedule: str, depth: int, name: str) -> None:
    strategy = strategy_for(schedule, depth)
    if schedule == "interleaved" and depth == 4 and name == "two-outputs":
        strategy = strategy_for(schedule, 3)
    if schedule == "zero-bubble" and name == "fourier":  # of more, some stage has no layer whose gradient can wait
        strategy = strategy_for(schedule, 2)
    ranks = on_threads(name, strategy, steps_of(strategy.m))
    assert_equal(ranks, plain(name, strategy.m), torch.float64)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_two_groups_of_two_ranks(schedule: str) -> None:
    strategy = strategy_for(schedule, 2, groups=2, m=3)
    ranks = on_threads("skips", strategy, steps_of(strategy.m))
    assert_equal(ranks, plain("skips", strategy.m), torch.float64)


@pytest.mark.parametrize("size", [0, 256, 1 << 30])
@pytest.mark.parametrize(("schedule", "groups"), [("master", 1), ("master", 2), ("1f1b", 2), ("zero-bubble", 2)])
def test_gradients_in_buckets_of_any_size(schedule: str, groups: int, size: int) -> None:
    strategy = strategy_for(schedule, 2, groups=groups, m=3, gradient_bytes=size)
    ranks = on_threads("skips", strategy, steps_of(strategy.m))
    assert_equal(ranks, plain("skips", strategy.m), torch.float64)


def test_single_precision() -> None:
    strategy = strategy_for("bidirectional", 3)
    ranks = on_threads("skips", strategy, steps_of(strategy.m, torch.float32))
    assert_equal(ranks, plain("skips", strategy.m, torch.float32), torch.float32)


@pytest.mark.parametrize("schedule", ["gpipe", "zero-bubble", "bidirectional"])
def test_recomputed_stages_count_once_and_draw_the_same_numbers(schedule: str) -> None:
    strategy = strategy_for(schedule, 3, policy=ActivationPolicy(recompute="stage"))
    ranks = on_threads("skips", strategy, steps_of(strategy.m))
    assert_equal(ranks, plain("skips", strategy.m), torch.float64)


@pytest.mark.parametrize(("schedule", "depth", "groups"), [("master", 2, 1), ("bidirectional", 3, 1), ("mast", 2, 2)])
def test_dividing_the_optimizer_state_changes_nothing(schedule: str, depth: int, groups: int) -> None:
    strategy = strategy_for(schedule, depth, groups, zero=1)
    whole, sharded = [], []

    def held(communicator: Communicator, _: Any, shard: bool, sizes: list[int]) -> dict[str, Any]:
        chosen = strategy if shard else strategy_for(schedule, depth, groups)
        optimizers: list[torch.optim.Optimizer] = []

        def make(parameters: Any) -> torch.optim.Optimizer:
            optimizers.append(SGD(parameters))
            return optimizers[-1]

        result = run(communicator, "skips", chosen, steps_of(chosen.m), make_optimizer=make)
        sizes.append(sum(t.numel() for o in optimizers for s in o.state.values() for t in s.values()))
        return result

    ranks = run_on_threads(strategy.ranks, functools.partial(held, shard=True, sizes=sharded), timeout_s=60)
    run_on_threads(strategy.ranks, functools.partial(held, shard=False, sizes=whole), timeout_s=60)
    assert_equal(ranks, plain("skips", strategy.m), torch.float64)
    assert sum(sharded) < 0.75 * sum(whole) if depth % 2 else 2 * groups * sum(sharded) == sum(whole)


def test_tile_shapes_and_sizes_may_change_from_step_to_step() -> None:
    steps = [batch_of([3, 3, 3, 3, 1], px, px, torch.float64) for px in (12, 20, 12)]
    expected = plain_run(net("skips", torch.float64), NETS["skips"][1], SGD, steps, seed=SEED, lr=LR)
    for schedule in ("1f1b", "bidirectional"):
        assert_equal(on_threads("skips", strategy_for(schedule, 3), steps), expected, torch.float64)


def test_another_number_of_tiles_than_usual_is_made_good() -> None:
    steps = [batch_of([2] * 5, 12, 1, torch.float64), batch_of([1, 2, 1, 1, 2], 12, 2, torch.float64)]
    expected = plain_run(net("skips", torch.float64), NETS["skips"][1], SGD, steps, seed=SEED, lr=LR)
    assert_equal(on_threads("skips", strategy_for("gpipe", 2), steps), expected, torch.float64)


def test_cuts_and_schedule_can_be_given() -> None:
    cuts = ("down2.0", "up2")
    rows = "0F0,0F1,0B0,0F2,0B1,0B2\n1F0,1F1,1B0,1F2,1B1,1B2\n2F0,2B0,2F1,2B1,2F2,2B2\n"
    strategy = Strategy("1f1b", 3, 3, 3, cuts=cuts, schedule_csv=rows)
    assert_equal(on_threads("skips", strategy, steps_of(3)), plain("skips", 3), torch.float64)


def test_states_go_from_any_strategy_to_any_other() -> None:
    """Two steps under one strategy and two under another are four under none."""
    steps = steps_of(4, steps=4)
    expected = plain_run(net("skips", torch.float64), NETS["skips"][1], SGD, steps, seed=SEED, lr=LR)

    def first(communicator: Communicator, _: Any) -> dict[str, Any]:
        engine = build(communicator, "skips", strategy_for("interleaved", 2, m=4), steps)
        train(engine, steps[:2])
        return engine.state_dict()

    state = run_on_threads(2, first, timeout_s=60)[0]

    def second(communicator: Communicator, _: Any) -> dict[str, Any]:
        engine = build(communicator, "skips", strategy_for("master", 3, m=4, zero=2), steps)
        engine.load_state_dict(copy.deepcopy(state))
        train(engine, steps[2:], first=2)
        return engine.state_dict()

    final = run_on_threads(3, second, timeout_s=60)[0]
    assert largest_error(expected.model, final["model"]) <= 1e-9
    plain_optimizer = SGD(net("skips", torch.float64).parameters())
    plain_optimizer.load_state_dict(final["optimizer"])


def test_a_state_of_another_model_is_refused() -> None:
    def load(communicator: Communicator, _: Any) -> None:
        engine = build(communicator, "skips", strategy_for("gpipe", 2), steps_of(5))
        engine.load_state_dict({"model": net("two-outputs", torch.float64).state_dict(), "optimizer": {}})

    with pytest.raises(ValueError, match="of another model"):
        run_on_threads(2, load, timeout_s=60)


def test_a_loss_that_is_not_finite_stops_every_rank_before_the_update() -> None:
    steps = steps_of(4)
    steps[1][3][0][0, 0, 0, 0] = torch.nan

    def step(communicator: Communicator, _: Any) -> tuple[list[int], bool]:
        engine = build(communicator, "skips", strategy_for("bidirectional", 2, m=4), steps)
        train(engine, steps[:1])
        before = engine.state_dict()
        with pytest.raises(NonFiniteLoss) as caught:
            train(engine, steps[1:], first=1)
        after = engine.state_dict()
        model = before.get("model", {})
        return caught.value.microbatches, all(torch.equal(value, after["model"][key]) for key, value in model.items())

    assert run_on_threads(2, step, timeout_s=60) == [([3], True)] * 2


def test_a_fault_names_rank_action_stage_and_shapes_and_marks_the_cell() -> None:
    steps = steps_of(4)

    def step(communicator: Communicator, _: Any) -> None:
        engine = build(communicator, "skips", strategy_for("1f1b", 2, m=4), steps)
        batch = copy.deepcopy(steps[0])
        if communicator.rank == 1:
            images, targets = batch[2]
            batch[2] = (images, targets[:, :-1])
        train(engine, [batch])

    with pytest.raises(EngineFault) as caught:
        run_on_threads(2, step, timeout_s=60)
    message = str(caught.value)
    assert message.startswith(("rank 1 failed (ValueError: ", "rank 1 failed (RuntimeError: "))
    assert "1F2: forward pass of microbatch 2 through stage 1" in message
    assert "(2, " in message
    assert ">>1F2<<" in message


def test_images_of_another_shape_than_announced_are_a_fault() -> None:
    steps = steps_of(4)

    def step(communicator: Communicator, _: Any) -> None:
        engine = build(communicator, "skips", strategy_for("gpipe", 2, m=4), steps)
        mine = [Microbatch(images[:1], targets, tuple(images.shape)) for images, targets in steps[0]]
        engine.step(mine, 0, LR)

    with pytest.raises(EngineFault, match=r"announced as \(2, 3, 12, 12\) and holds images \(1, 3, 12, 12\)"):
        run_on_threads(2, step, timeout_s=60)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"cuts": ("up2",)}, "1 cuts make 2 stages and 3 are needed"),
        ({"zero": 1}, "each stage is on one rank alone"),
        ({"schedule_csv": "0F0\n1F0,1B0\n2F0,2B0\n"}, "0B0"),
    ],
)
def test_a_strategy_that_does_not_fit_is_refused(more: dict[str, Any], message: str) -> None:
    strategy = Strategy("gpipe", 3, 3, 1, **more)
    with pytest.raises(ValueError, match=message):
        on_threads("skips", strategy, steps_of(1))


def test_deferred_statistics_are_those_of_the_whole_batch() -> None:
    """On one rank, on two groups and on inverted replicas alike."""
    steps = steps_of(6)
    states = [
        on_threads("two-outputs", strategy, steps)[0]["state"]["model"]
        for strategy in (
            Strategy("mp-basic", 1, 1, 6, statistics="deferred"),
            Strategy("gpipe", 4, 2, 6, statistics="deferred"),
            Strategy("bidirectional", 3, 3, 6, statistics="deferred", policy=ActivationPolicy(recompute="stage")),
        )
    ]
    for state in states[1:]:
        assert largest_error(states[0], state) <= 1e-9
    model = net("two-outputs", torch.float64).train()
    mean = 0.1 * torch.cat([model.get_submodule("stem.0")(images) for images, _ in steps[0]]).mean((0, 2, 3))
    assert states[0]["stem.1.num_batches_tracked"] == 2
    one_step = on_threads("two-outputs", Strategy("gpipe", 2, 2, 6, statistics="deferred"), steps[:1])
    assert torch.allclose(one_step[0]["state"]["model"]["stem.1.running_mean"], mean, rtol=1e-10)


def test_one_rank_runs_without_a_communicator_to_speak_of() -> None:
    strategy = Strategy("gpipe", 1, 1, 5)
    assert_equal([run(LocalCommunicator(), "skips", strategy, steps_of(5))], plain("skips", 5), torch.float64)


@pytest.mark.process
def test_compiled_stages_give_the_plain_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The net has few kernels, as each takes seconds to compile: statistics, numbers drawn, in-place changes."""

    def small() -> nn.Module:
        first = (nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU(inplace=True))
        return nn.Sequential(*first, nn.Dropout(0.3), nn.Conv2d(4, 3, 1))

    monkeypatch.setitem(ALL_NETS, "small", (small, pixel_loss))
    monkeypatch.setattr(torch._inductor.config, "compile_threads", 1)  # no processes that load torch to compile
    ranks = [run(LocalCommunicator(), "small", Strategy("gpipe", 1, 1, 2, compile=True), steps_of(2))]
    assert_equal(ranks, plain("small", 2), torch.float64)
