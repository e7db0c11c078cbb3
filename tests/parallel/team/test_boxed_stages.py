"""Stages in boxes, of a rank alone and of teams, under schedules: loss, gradients, running statistics, updates and
predictions of the plain step."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from app.training.exactness import CroppedImages
from benchmarks.in_boxes import planned_regions
from benchmarks.whole_engine import whole_engine
from models.losses import PixelClassLoss
from parallel.build import assemble
from parallel.comm.communicator import Communicator
from parallel.comm.local import LocalCommunicator
from parallel.comm.thread_comm import run_on_threads
from parallel.engine.engine import Engine
from parallel.engine.step import Microbatch
from parallel.graph.partition import Partition
from parallel.memory.policy import ActivationPolicy
from parallel.space.team import Grid
from parallel.strategy import Strategy
from parallel.streaming.read_region import NothingTileable
from parallel.team.boxed_nodes import PlannedRegion
from parallel.team.team_comm import TeamComm
from parallel.team.team_plan import BoxedParts, team_plans
from parallel.team.team_stages import team_stages
from parallel.trace.trace import trace_as_it_runs
from tests.helpers import engine_runs
from tests.helpers.engine_runs import assert_equal, on_threads, plain, run, steps_of
from tests.helpers.plain_step import plain_run
from tests.helpers.ranks import run_on_ranks
from tests.helpers.small_nets import ALL_NETS, batch_of
from tests.helpers.tiny_models import classifier
from tests.parallel.engine.test_teams import of_teams

SHAPE, M = (1, 3, 40, 56), 4
STRIPS, COLUMNS, QUARTERS = Grid(2, 1), Grid(1, 2), Grid(2, 2)
BOXES = ActivationPolicy(stream=4)
GROUPS = of_teams("1f1b", COLUMNS, groups=2, policy=ActivationPolicy(stream=4, optimizer=True))
PIPELINE = of_teams("1f1b", STRIPS, policy=BOXES)


@pytest.mark.parametrize(
    ("net", "strategy"),
    [
        ("skips", PIPELINE),
        ("skips", GROUPS),
        pytest.param("skips", of_teams("gpipe", QUARTERS, policy=BOXES), marks=pytest.mark.long),
        pytest.param("skips", of_teams("interleaved", STRIPS, policy=BOXES), marks=pytest.mark.long),
        pytest.param("skips", of_teams("master", COLUMNS, policy=BOXES), marks=pytest.mark.long),
        ("skips", of_teams("bidirectional", STRIPS, 3, policy=BOXES)),
        pytest.param("skips", of_teams("spatial", COLUMNS, groups=2, policy=BOXES), marks=pytest.mark.long),
        ("two-outputs", of_teams("mp-basic", STRIPS, policy=BOXES)),
        pytest.param("two-outputs", of_teams("mast", QUARTERS, m=2, policy=BOXES), marks=pytest.mark.long),
    ],
    ids=lambda value: str(value).replace(" ", "-"),
)
def test_every_schedule_gives_the_plain_step(net: str, strategy: Strategy) -> None:
    assert_equal(on_threads(net, strategy, steps_of(strategy.m)), plain(net, strategy.m), torch.float64)


def test_tiles_of_another_size_in_a_later_step() -> None:
    """Each stage has boxes for either, which end where members' parts of that tile do."""
    given = [batch_of([2] * 4, px, px, torch.float64) for px in (12, 16)]
    model, loss = engine_runs.net("skips", torch.float64), ALL_NETS["skips"][1]
    expected = plain_run(model, loss, engine_runs.SGD, given, seed=engine_runs.SEED, lr=engine_runs.LR)
    assert_equal(on_threads("skips", PIPELINE, given), expected, torch.float64)


def on_a_rank(communicator: Communicator, name: str) -> dict[str, Any]:
    return run(communicator, "skips", PROCESSES[name], steps_of(PROCESSES[name].m))


PROCESSES = {"pipeline": PIPELINE, "spatial": of_teams("spatial", STRIPS, policy=BOXES)}


@pytest.mark.process
@pytest.mark.parametrize("launcher", ["forked", "mpi"])
@pytest.mark.parametrize("name", list(PROCESSES))
def test_processes_give_the_plain_step(name: str, launcher: Any, tmp_path: Path) -> None:
    strategy = PROCESSES[name]
    ranks = run_on_ranks(strategy.ranks, f"{__name__}:on_a_rank", tmp_path, name, launcher=launcher)
    assert_equal(ranks, plain("skips", strategy.m), torch.float64)


class Gated(nn.Module):
    """A segmenter whose gate, pooled map and image pass between stages, as do skips."""

    def __init__(self, classes: int = 3) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(inplace=True))
        self.down = nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(6, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU())
        self.squeeze = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(6, 6, 1), nn.Sigmoid())
        self.middle = nn.Conv2d(6, 6, 3, padding=1)
        self.up = nn.ConvTranspose2d(6, 6, 2, 2)
        self.head = nn.Sequential(nn.BatchNorm2d(15), nn.Conv2d(15, classes, 3, padding=1))

    def forward(self, x: Tensor) -> Tensor:
        skip = self.first(x)
        y = self.down(skip)
        gate = self.squeeze(y)
        y = self.middle(y) * gate
        logits: Tensor = self.head(torch.cat((skip, self.up(y), x), 1))
        return logits


def gated() -> nn.Module:
    torch.manual_seed(0)
    return Gated().double()


def tile(i: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(i)
    images = torch.randn(SHAPE, generator=generator, dtype=torch.float64)
    return images, torch.randint(0, 3, (1, *SHAPE[2:]), generator=generator, dtype=torch.uint8)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def staged(name: str, ranks: int, grid: Grid | None = None, policy: Any = None, **more: Any) -> Strategy:
    """Two stages on ``ranks`` ranks or teams."""
    members, chunks = (grid.members if grid else 1), 2 if name == "interleaved" else 1
    boxes = ActivationPolicy(stream=16, **(policy or {}))
    return Strategy(name, ranks * members, 2, M, chunks, policy=boxes, grid=grid, **more)


Plans = dict[int, list[PlannedRegion | NothingTileable]]
"""By stage: what its training pass has in boxes, of maps and of sums."""
Result = tuple[float, dict[str, Tensor], dict[str, Tensor], list[Tensor]]


def steps(engine: Any, made: Callable[[Tensor], Any]) -> Result:
    """Loss of the second step, gradients of the first, then the state, and what is predicted with it.

    Args:
        made: of images and targets, what the engine is given.
    """
    gradients: dict[str, Tensor] = {}
    for number in range(2):
        given = [Microbatch(*map(made, tile(M * number + i)), SHAPE) for i in engine.share]
        loss = engine.step(given, number, 0.1).loss
        gradients = gradients or {name: gradient.clone() for name, gradient in engine.gradients().items()}
    loss_of = PixelClassLoss()
    held_out = Microbatch(*map(made, tile(9)), SHAPE)
    sums = [engine.predict(held_out, wanted) for wanted in (None, loss_of.sums)]
    return loss, gradients, engine.state_dict().get("model", {}), [value for value in sums if value is not None]


def plans_of(engine: Engine) -> Plans:
    return {number: planned_regions(stage.module, SHAPE) for number, stage in engine._work.stages.items()}


def engine_of(module: nn.Module, communicator: Communicator, strategy: Strategy) -> Engine:
    device = torch.device("cpu")
    return assemble(module, PixelClassLoss(), sgd, communicator, strategy, shape=SHAPE, batch=M, device=device)


def rank_steps(communicator: Communicator, given: tuple[Strategy, dict[str, Tensor]]) -> tuple[Result, Plans]:
    strategy, state = given
    module = gated()
    module.load_state_dict(state)  # ranks that are threads draw from one generator at once
    engine = engine_of(module, communicator, strategy)
    return steps(engine, CroppedImages), plans_of(engine)


@pytest.fixture(scope="module")
def plain_steps() -> Result:
    engine = whole_engine(gated(), PixelClassLoss(), sgd, LocalCommunicator(), batch=M, m=M, shape=SHAPE)
    return steps(engine, lambda tensor: tensor)


@pytest.mark.parametrize(
    ("strategy", "gate"),
    [
        (staged("1f1b", 2, cuts=("squeeze.1",)), "squeeze_0"),
        pytest.param(staged("1f1b", 2, cuts=("mul",)), "squeeze_2", marks=pytest.mark.long),
        pytest.param(staged("gpipe", 4, cuts=("middle",)), "", marks=pytest.mark.long),
        pytest.param(staged("master", 2, zero=1), "", marks=pytest.mark.long),
        (staged("bidirectional", 2), ""),
        pytest.param(staged("interleaved", 2), "", marks=pytest.mark.long),
        (staged("1f1b", 2, STRIPS, cuts=("squeeze.1",)), "squeeze_0"),
        pytest.param(
            staged("gpipe", 2, QUARTERS, {"host_bytes": 1}, cuts=("mul",)), "squeeze_2", marks=pytest.mark.long
        ),
    ],
    ids=[
        "a gate from a pooled map",
        "a gate and its map",
        "two groups",
        "master",
        "bidirectional",
        "interleaved",
        "teams, a gate from a pooled map",
        "teams, a gate, its map, few stored maps",
    ],
)
def test_gates_images_and_sums_of_the_loss_pass_between_stages(
    strategy: Strategy, gate: str, plain_steps: Result
) -> None:
    loss, gradients, state, predicted = plain_steps
    largest = max(float(gradient.abs().max()) for gradient in gradients.values())
    found: dict[str, Tensor] = {}
    seen: list[list[Tensor]] = []
    results = run_on_threads(strategy.ranks, rank_steps, (strategy, gated().state_dict()))
    for ours, plans in results:
        assert ours[0] == pytest.approx(loss, rel=1e-10)
        for key, gradient in ours[1].items():
            torch.testing.assert_close(gradient, gradients[key], rtol=1e-10, atol=1e-10 * largest)
        found |= ours[1]
        seen += [ours[3]] if ours[3] else []
        for number, regions in plans.items():
            assert all(isinstance(region, PlannedRegion) for region in regions), number
            if number == strategy.mesh.stages - 1:
                assert any(region.sums for region in regions)  # type: ignore[union-attr]
                assert not gate or {region.run.region.given for region in regions} == {(gate,)}  # type: ignore[union-attr]
    assert found.keys() == gradients.keys()
    torch.testing.assert_close(results[0][0][2], state, rtol=1e-9, atol=1e-11)
    assert seen
    for output, sums in seen:
        torch.testing.assert_close(output, predicted[0], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(sums, predicted[1], rtol=1e-6, atol=1e-5)


def all_plans(module: nn.Module, strategy: Strategy) -> Plans:
    def rank(communicator: Communicator, _: Any) -> Plans:
        return plans_of(engine_of(copy.deepcopy(module), communicator, strategy))

    return functools.reduce(dict.__or__, run_on_threads(strategy.ranks, rank, [None] * strategy.ranks))


def alone_or_teams(*cuts: str) -> list[Strategy]:
    """Two stages on one rank, and on two teams of two."""
    alone = Strategy("interleaved", 1, 1, M, 2, cuts, policy=ActivationPolicy(stream=16))
    return [alone, staged("1f1b", 2, STRIPS, cuts=cuts)]


@pytest.mark.parametrize("strategy", alone_or_teams("middle"), ids=["alone", "teams"])
def test_boxes_are_those_of_the_tile_in_stages_of_smaller_maps(strategy: Strategy) -> None:
    """A box of 16 px of the tile, 40 x 56 px, is one of 8 px of maps half as large: a member has two rows of boxes."""
    for (plan,) in all_plans(gated(), strategy).values():
        assert isinstance(plan, PlannedRegion)
        assert plan.run.boxes.model.side == SHAPE[2:]
        assert len(plan.run.phases[0].parts[0].places) == (2 if strategy.grid else 3) * 4


@pytest.mark.parametrize("strategy", alone_or_teams("7"), ids=["alone", "teams"])
def test_a_stage_without_anything_for_boxes_is_computed_whole(strategy: Strategy) -> None:
    plans = all_plans(classifier(3).double(), strategy)
    assert [type(plan) for number in sorted(plans) for plan in plans[number]] == [PlannedRegion, NothingTileable]


@pytest.mark.parametrize("strategy", alone_or_teams(), ids=["alone", "teams"])
def test_no_stage_at_all_is_an_error(strategy: Strategy) -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(3 * 40 * 56, 4), nn.ReLU(), nn.Linear(4, 3)).double()
    with pytest.raises(NothingTileable, match=r"finds nothing to compute box by box: .*Leave --stream out"):
        all_plans(net, strategy)


class _SpansFirst(nn.Module):
    """Looks at the whole image first, and convolves what it made of it."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.last = nn.Linear(3, 3), nn.Conv2d(3, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        mixed: Tensor = self.last(self.mix(x.softmax(2).transpose(1, 3)).transpose(1, 3))
        return mixed


def test_a_stage_after_one_that_spans_the_image_has_boxes_on_a_rank_alone() -> None:
    plans = all_plans(_SpansFirst().double(), alone_or_teams("last")[0])
    assert [type(plans[number][0]) for number in (0, 1)] == [NothingTileable, PlannedRegion]


def test_split_backward_passes_are_refused() -> None:
    with pytest.raises(ValueError, match="cannot split it as zero-bubble does"):
        all_plans(gated(), Strategy("zero-bubble", 1, 1, M, policy=ActivationPolicy(stream=16)))


def test_maps_of_all_microbatches_in_flight_share_the_budget_of_the_host() -> None:
    policy = ActivationPolicy(stream=16, host_bytes=1000 * M)
    engine = engine_of(gated(), LocalCommunicator(), Strategy("gpipe", 1, 1, M, policy=policy))
    assert engine._work.stages[0].module._run_training._boxed.stored_bytes == 1000  # type: ignore[union-attr]


def test_boxes_are_on_the_device_of_their_stage() -> None:
    """Regions are read, and planned, while the model still lies on the CPU."""
    shape, traced, device = (
        (1, 3, 32, 32),
        trace_as_it_runs(classifier(3), (1, 3, 32, 32), torch.float32),
        torch.device("cuda"),
    )

    def member(communicator: Communicator, _: None) -> set[torch.device]:
        own = copy.deepcopy(traced)
        plans, whole = team_plans(own, STRIPS, once=False), Partition(own.graph, (0,))
        comm = TeamComm(communicator)
        stage = team_stages(own, whole, [0], STRIPS, comm, plans, device, boxed=BoxedParts(8))[0].train()
        plan = stage._run_training.planned(stage, plans(shape, True), ())  # type: ignore[union-attr]
        return {place for _, _, place in plan.run.region.forms.values()}

    assert run_on_threads(2, member, [None] * 2) == [{device}] * 2


class Halves(nn.Module):
    """Takes a map apart by channels, or what was pooled of it, in one stage and uses the pieces in the next."""

    def __init__(self, pooled: bool) -> None:
        super().__init__()
        self.pooled, self.first, self.last = pooled, nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(2, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        one, other = (y.mean((2, 3), keepdim=True) if self.pooled else y).chunk(2, 1)
        logits: Tensor = self.last(y[:, :2] * one + other)
        return logits


@pytest.mark.parametrize(("pooled", "what"), [(False, "maps"), (True, "tensors")])
def test_several_maps_as_one_value_are_refused_by_name(pooled: bool, what: str) -> None:
    with pytest.raises(ValueError, match=rf"--stream: chunk is several {what}, which pass from stage to stage"):
        all_plans(Halves(pooled).double(), alone_or_teams("getitem")[1])
