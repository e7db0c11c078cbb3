"""Transparency: every schedule on any mesh gives the losses, gradients and statistics of the plain step."""

from __future__ import annotations

import copy
import functools
import gc
import random
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import cross_entropy

from parallel.comm.communicator import Communicator
from parallel.comm.thread_comm import LocalCommunicator, run_on_threads
from parallel.engine.step import EngineFault, NonFiniteLoss
from parallel.graph.partition import cut_positions
from parallel.memory.policy import ActivationPolicy
from parallel.schedule.registry import SCHEDULES
from parallel.space.team import TeamGrid
from parallel.strategy import Strategy
from parallel.trace.trace import trace
from tests.helpers import engine_runs
from tests.helpers.engine_runs import (
    SGD,
    assert_equal,
    assert_plain,
    build,
    net,
    on_threads,
    plain,
    plain_of,
    run,
    steps_of,
    strategy_for,
    train,
)
from tests.helpers.lanes import long_where
from tests.helpers.plain_step import Batch, largest_error
from tests.helpers.small_nets import ALL_NETS, Made, SkipNet, batch_of, pixel_loss


@pytest.mark.pairs
@pytest.mark.parametrize("name", ALL_NETS)
@pytest.mark.parametrize("depth", [2, 3, 4])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_gives_the_plain_step(schedule: str, depth: int, name: str) -> None:
    if (schedule, depth, name) == ("interleaved", 4, "two-outputs"):
        depth = 3
    if (schedule, name) == ("zero-bubble", "fourier"):  # of more, some stage has no layer whose gradient can wait
        depth = 2
    assert_plain(name, strategy_for(schedule, depth, m=depth + 1))


ROWS = "0F0,0F1,0B0,0F2,0B1,0B2\n1F0,1F1,1B0,1F2,1B1,1B2\n2F0,2B0,2F1,2B1,2F2,2B2\n"
MIXED = "0F0,0I0,0F1,0W0,0B1\n1F0,1I0,1F1,1B1,1W0\n"
TWO_GROUPS = {f"{name}, two groups": ("skips", strategy_for(name, 2, groups=2, m=3)) for name in SCHEDULES}
OPTIONS = TWO_GROUPS | {
    f"{name}, {groups} groups, buckets of {size}": ("skips", strategy_for(name, 2, groups, m=3, gradient_bytes=size))
    for name, groups, size in (("master", 1, 256), ("master", 2, 0), ("1f1b", 2, 1 << 30), ("zero-bubble", 2, 256))
}
OPTIONS |= {
    # zero-bubble gave a zero gradient to the parameter that no loss reaches: weight decay shrank it.
    "zero-bubble, two groups, an unused parameter": ("two-outputs", strategy_for("zero-bubble", 2, groups=2, m=3)),
    "pairs of three, divided state": ("skips", strategy_for("bidirectional", 3, zero=1)),
    "two groups of pairs, divided state": ("skips", strategy_for("mast", 2, 2, zero=1)),
    "whole and split backward passes": ("skips", Strategy("1f1b", 2, 2, 2, schedule_csv=MIXED)),
    "cuts and schedule given": ("skips", Strategy("1f1b", 3, 3, 3, cuts=("down2.0", "up2"), schedule_csv=ROWS)),
}


@pytest.mark.parametrize("case", OPTIONS)
def test_every_option_gives_the_plain_step(case: str) -> None:
    assert_plain(*OPTIONS[case])


def test_single_precision() -> None:
    assert_plain("skips", strategy_for("bidirectional", 3), torch.float32)


@pytest.mark.parametrize("schedule", ["gpipe", "zero-bubble", "bidirectional"])
def test_recomputed_stages_count_once_and_draw_the_same_numbers(schedule: str) -> None:
    assert_plain("skips", strategy_for(schedule, 3, m=4, policy=ActivationPolicy(recompute="stage")))


class PythonNoise(nn.Module):
    """Scales by numbers of the generators of Python and NumPy."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (random.random() + np.random.rand())  # noqa: NPY002


def with_python_noise() -> nn.Module:
    parts = (nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), PythonNoise(), nn.Tanh()) for _ in range(4))
    return nn.Sequential(*parts)


@pytest.mark.parametrize("recompute", ["stage", "block"])
def test_stages_continue_and_recompute_with_the_numbers_of_python(
    recompute: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ALL_NETS, "python noise", (with_python_noise, pixel_loss))
    whole, stages = Strategy("gpipe", 1, 1, 2), Strategy("gpipe", 2, 2, 2, policy=ActivationPolicy(recompute))
    (expected,), (found, _) = (on_threads("python noise", each, steps_of(2)) for each in (whole, stages))
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-10)
    assert largest_error(expected["state"]["model"], found["state"]["model"]) <= 1e-10


@pytest.mark.parametrize(
    "strategy",
    [Strategy("ddp", 2, 1, 4), Strategy("ddp", 2, 1, 4, zero=2), Strategy("master", 2, 2, 4)],
    ids=str,
)
def test_parameters_may_be_parts_of_larger_tensors(strategy: Strategy, monkeypatch: pytest.MonkeyPatch) -> None:
    """They were given gradients of others. A buffer that is one number seen as many ended the run."""

    def sliced(name: str, dtype: torch.dtype) -> nn.Module:
        model = net(name, dtype)
        for parameter in model.parameters():
            parameter.data = torch.stack([parameter.detach()] * 2, -1)[..., 0]
        model.register_buffer("factor", torch.ones(1, dtype=dtype).expand(3))
        return model

    monkeypatch.setattr(engine_runs, "net", sliced)
    assert_equal(on_threads("skips", strategy, steps_of(4)), plain_of("skips", steps_of(4)), torch.float64)


UNEVEN = [batch_of([2] * 5, 12, 1, torch.float64), batch_of([1, 2, 1, 1, 2], 12, 2, torch.float64)]
RESIZED = [batch_of([3, 3, 3, 3, 1], px, px, torch.float64) for px in (12, 20, 12)]


@pytest.mark.parametrize(
    ("name", "strategy", "steps"),
    [
        ("skips", strategy_for("1f1b", 3), RESIZED),
        ("skips", strategy_for("bidirectional", 3), RESIZED),
        ("skips", strategy_for("gpipe", 2), UNEVEN),
        ("averaging", Strategy("single", 1, 1, 5), UNEVEN),
        ("averaging", Strategy("ddp", 2, 1, 5, gradient_bytes=0), UNEVEN),
        ("skips", Strategy("ddp", 3, 1, 5, zero=1), UNEVEN),
        ("skips", Strategy("ddp", 3, 1, 5, zero=2), UNEVEN),
        ("skips", Strategy("1f1b", 4, 2, 5, grid=TeamGrid(1, 2)), RESIZED),
    ],
    ids=str,
)
def test_tiles_may_change_from_step_to_step(
    name: str, strategy: Strategy, steps: list[Batch], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ALL_NETS, "averaging", (functools.partial(SkipNet, None), pixel_loss))
    assert_equal(on_threads(name, strategy, steps), plain_of(name, steps), torch.float64)


@pytest.mark.parametrize(
    "strategy",
    [
        strategy_for("bidirectional", 2, m=4),
        Strategy("ddp", 4, 1, 4, zero=2),
        Strategy("ddp", 4, 1, 4, zero=2, policy=ActivationPolicy(optimizer=True)),
    ],
    ids=str,
)
def test_a_loss_that_is_not_finite_stops_every_rank_before_the_update(strategy: Strategy) -> None:
    steps = steps_of(4)
    steps[1][3][0][0, 0, 0, 0] = torch.nan

    def step(communicator: Communicator, _: Any) -> tuple[dict[str, Any], dict[str, Any], list[int]]:
        engine = build(communicator, "skips", strategy, steps)
        train(engine, steps[:1])
        before = copy.deepcopy(engine.state_dict())
        with pytest.raises(NonFiniteLoss) as caught:
            train(engine, steps[1:], first=1)
        after = copy.deepcopy(engine.state_dict())
        train(engine, steps[:1], first=1)
        return before, after, caught.value.microbatches

    ranks = run_on_threads(strategy.ranks, step, timeout_s=60)
    assert [microbatches for _, _, microbatches in ranks] == [[3]] * strategy.ranks
    (before, after, _), *_ = ranks
    torch.testing.assert_close(after["model"], before["model"], rtol=0, atol=0)
    torch.testing.assert_close(after["optimizer"]["state"], before["optimizer"]["state"], rtol=0, atol=0)


def test_a_fault_names_rank_action_stage_and_shapes_and_marks_the_cell() -> None:
    steps = steps_of(4)

    def step(communicator: Communicator, _: Any) -> None:
        engine = build(communicator, "skips", strategy_for("1f1b", 2, m=4), steps)
        batch = copy.deepcopy(steps[0])
        if communicator.rank == 1:
            batch[2] = (batch[2][0], batch[2][1][:, :-1])
        train(engine, [batch])

    with pytest.raises(EngineFault, match=r"^rank 1 failed \((Value|Runtime)Error: ") as caught:
        run_on_threads(2, step, timeout_s=60)
    assert all(word in str(caught.value) for word in ("1F2", "microbatch 2", "stage 1", "(2, ", ">>1F2<<"))


def test_deferred_statistics_are_those_of_the_whole_batch() -> None:
    steps = steps_of(6)
    strategies = (
        Strategy("mp-basic", 1, 1, 6, statistics="deferred"),
        Strategy("gpipe", 4, 2, 6, statistics="deferred"),
        Strategy("bidirectional", 3, 3, 6, statistics="deferred", policy=ActivationPolicy(recompute="stage")),
    )
    states = [on_threads("two-outputs", each, steps)[0]["state"]["model"] for each in strategies]
    for state in states[1:]:
        assert largest_error(states[0], state) <= 1e-9
    assert states[0]["stem.1.num_batches_tracked"] == 2
    model = net("two-outputs", torch.float64).train()
    mean = 0.1 * torch.cat([model.get_submodule("stem.0")(images) for images, _ in steps[0]]).mean((0, 2, 3))
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
    monkeypatch.setattr("torch._inductor.config.compile_threads", 1)  # no processes that load torch to compile
    ranks = [run(LocalCommunicator(), "small", Strategy("gpipe", 1, 1, 2, compile=True), steps_of(2))]
    assert_equal(ranks, plain("small", 2), torch.float64)


@pytest.mark.parametrize("schedule", ["master", "zero-bubble"])
def test_engines_that_are_let_go_of_free_their_parameters(schedule: str) -> None:
    """Hooks held the gradient exchange, which holds the parameters that the hooks are on: ranks grew at each engine."""
    held: list[weakref.ref[Any]] = []

    def make(parameters: Any) -> torch.optim.Optimizer:
        own = list(parameters)
        held.extend(weakref.ref(parameter) for _, parameter in own)
        return SGD(own)

    def rank(communicator: Communicator, _: None) -> None:
        engine = build(communicator, "two-outputs", strategy_for(schedule, 2, 2, m=2), steps_of(4), make_optimizer=make)
        train(engine, steps_of(4, steps=1))
        engine.close()

    run_on_threads(4, rank)
    gc.collect()
    assert held
    assert not [reference for reference in held if reference() is not None]


class NormAndReLU(nn.BatchNorm2d):
    """As timm has one: batch norm and activation in one layer."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        statistics = self.running_mean, self.running_var
        y = functional.batch_norm(x, *statistics, self.weight, self.bias, self.training, self.momentum or 0.0, self.eps)
        return y.relu()


def with_own_norms() -> nn.Module:
    first, last = nn.Conv2d(3, 4, 1, bias=False), nn.Conv2d(4, 3, 1)
    return nn.Sequential(first, NormAndReLU(4), nn.Conv2d(4, 4, 1, bias=False), NormAndReLU(4), last)


@pytest.mark.parametrize(
    "strategy", [Strategy("master", 2, 2, 4), strategy_for("gpipe", 2, m=4, policy=ActivationPolicy("stage"))], ids=str
)
def test_batch_norms_that_are_not_torchs_own(strategy: Strategy, monkeypatch: pytest.MonkeyPatch) -> None:
    """timm's was traced into: under master its statistics were those of half of the tiles, recomputed of all twice."""
    monkeypatch.setitem(ALL_NETS, "own norms", (with_own_norms, pixel_loss))
    assert_equal(on_threads("own norms", strategy, steps_of(4)), plain_of("own norms", steps_of(4)), torch.float64)


def unused_branch(m: Any, x: Tensor) -> Tensor:
    """As encoders of more levels than their decoder takes."""
    x = m.first(x)
    m.second(x)
    return m.head(x.mean((2, 3)))


def detached_trunk(m: Any, x: Tensor) -> Tensor:
    return m.head(m.second(m.first(x)).detach().mean((2, 3)))


def written_in_place(m: Any, x: Tensor) -> Tensor:
    x = m.first(x)
    both = torch.zeros_like(x)
    both[:, :2] = m.second(x)[:, :2]
    return m.head(both.mean((2, 3)))


@pytest.mark.parametrize("recompute", long_where(["none", "block", "stage"], "stage"))
@pytest.mark.parametrize("compute", [unused_branch, detached_trunk, written_in_place])
def test_parameters_without_gradients_keep_none_wherever_a_model_is_cut(
    compute: Any, recompute: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weight decay would move them. Values written in place still carry theirs."""

    def make() -> nn.Module:
        norm = nn.Conv2d(4, 4, 1, bias=False), nn.BatchNorm2d(4), nn.ReLU(inplace=True)
        second = nn.Sequential(*norm, nn.Conv2d(4, 4, 1))
        return Made(compute, first=nn.Conv2d(3, 4, 3), second=second, head=nn.Linear(4, 3))

    name = compute.__name__
    monkeypatch.setitem(ALL_NETS, name, (make, lambda output, targets: cross_entropy(output, targets[:, 0, 0])))
    steps = steps_of(2, steps=1)
    expected = plain_of(name, steps)
    assert (len(expected.gradients) < len([*make().parameters()])) == (compute is not written_in_place)
    graph = trace(make(), (2, 3, 12, 12)).graph
    cuts = [graph.layers[position].name for position in cut_positions(graph)]
    assert len(cuts) >= 3
    for cut in cuts:
        strategy = Strategy("1f1b", ranks=2, depth=2, m=2, cuts=(cut,), policy=ActivationPolicy(recompute))
        assert_equal(on_threads(name, strategy, steps), expected, torch.float64)
