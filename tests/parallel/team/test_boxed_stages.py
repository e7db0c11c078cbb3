"""Stages in boxes, of a rank alone and of teams, under schedules: loss, gradients, running statistics, updates and
predictions of the plain step."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
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
from parallel.comm.thread_comm import LocalCommunicator, run_on_threads
from parallel.engine.engine import Engine
from parallel.engine.step import Microbatch
from parallel.graph.partition import Partition
from parallel.memory.policy import ActivationPolicy
from parallel.space.team import TeamGrid
from parallel.strategy import Strategy
from parallel.streaming.read_region import NothingTileable
from parallel.team.boxed_nodes import PlannedRegion
from parallel.team.team_comm import TeamComm
from parallel.team.team_plan import BoxedParts, team_plans
from parallel.team.team_stages import team_stages
from parallel.trace.trace import trace_as_it_runs
from tests.helpers.branched_nets import of_tiles
from tests.helpers.engine_runs import assert_equal, on_gpus, on_threads, plain_of, steps_of
from tests.helpers.lanes import long_where
from tests.helpers.odd_nets import NoisyScale
from tests.helpers.small_nets import ALL_NETS, Made, batch_of
from tests.helpers.tiny_models import classifier
from tests.parallel.engine.test_exactness import PIPELINE

SHAPE, M = (1, 3, 40, 56), 4
STRIPS, QUARTERS = TeamGrid(2, 1), TeamGrid(2, 2)


def test_tiles_of_another_size_in_a_later_step() -> None:
    """Each stage has boxes for either, which end where members' parts of that tile do."""
    given = [batch_of([2] * PIPELINE.m, px, px, torch.float64) for px in (12, 16)]
    assert_equal(on_threads("skips", PIPELINE, given), plain_of("skips", given), torch.float64)


class Gated(nn.Module):
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


def staged(name: str, ranks: int, grid: TeamGrid | None = None, policy: Any = None, **more: Any) -> Strategy:
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


GATES = {
    "a gate from a pooled map": (staged("1f1b", 2, cuts=("squeeze.1",)), "squeeze_0"),
    "a gate and its map": (staged("1f1b", 2, cuts=("mul",)), "squeeze_2"),
    "two groups": (staged("gpipe", 4, cuts=("middle",)), ""),
    "master": (staged("master", 2, zero=1), ""),
    "bidirectional": (staged("bidirectional", 2), ""),
    "interleaved": (staged("interleaved", 2), ""),
    "teams, a gate from a pooled map": (staged("1f1b", 2, STRIPS, cuts=("squeeze.1",)), "squeeze_0"),
    "teams, few stored maps": (staged("gpipe", 2, QUARTERS, {"host_bytes": 1}, cuts=("mul",)), "squeeze_2"),
}
QUICK = {"a gate from a pooled map", "bidirectional", "teams, a gate from a pooled map"}


@pytest.mark.parametrize("case", long_where(GATES, *set(GATES) - QUICK))
def test_gates_images_and_sums_of_the_loss_pass_between_stages(case: str, plain_steps: Result) -> None:
    (strategy, gate), (loss, gradients, state, predicted) = GATES[case], plain_steps
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
                assert any(region.sums for region in regions)
                assert not gate or {region.run.region.given for region in regions} == {(gate,)}
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
        assert plan.run.boxes.region.side == SHAPE[2:]
        assert len(plan.run.phases[0].parts[0].places) == (2 if strategy.grid else 3) * 4


def spans_first() -> nn.Module:
    parts = {"mix": nn.Linear(3, 3), "last": nn.Conv2d(3, 3, 3, padding=1)}
    return Made(lambda m, x: m.last(m.mix(x.softmax(2).transpose(1, 3)).transpose(1, 3)), **parts)


def test_maps_of_all_microbatches_in_flight_share_the_budget_of_the_host() -> None:
    policy = ActivationPolicy(stream=16, host_bytes=1000 * M)
    engine = engine_of(gated(), LocalCommunicator(), Strategy("gpipe", 1, 1, M, policy=policy))
    assert engine._work.stages[0].module._run_training._boxed.stored_bytes == 1000


def test_boxes_are_on_the_device_of_their_stage() -> None:
    """Regions are read, and planned, while the model still lies on the CPU."""
    shape, device = (1, 3, 32, 32), torch.device("cuda")
    traced = trace_as_it_runs(classifier(3), shape, torch.float32)

    def member(communicator: Communicator, _: None) -> set[torch.device]:
        own, comm = copy.deepcopy(traced), TeamComm(communicator)
        plans, whole = team_plans(own, STRIPS, once=False), Partition(own.graph, (0,))
        stage = team_stages(own, whole, [0], STRIPS, comm, plans, device, boxed=BoxedParts(8))[0].train()
        plan = stage._run_training.planned(stage, plans(shape, True), ())
        return {place for _, _, place in plan.run.region.forms.values()}

    assert run_on_threads(2, member) == [{device}] * 2


@pytest.mark.parametrize("stream", [None, 8])
def test_numbers_are_drawn_on_the_device_of_their_stage(stream: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """They were drawn on the CPU, where the model lay when its region was read."""
    monkeypatch.setitem(ALL_NETS, "noisy", (lambda: NoisyScale(3), of_tiles))
    strategy = Strategy("spatial", 2, 1, 2, policy=ActivationPolicy(stream=stream), grid=STRIPS)
    assert_equal(on_gpus("noisy", strategy, steps_of(2)), plain_of("noisy", steps_of(2)), torch.float64)


def halves(pooled: bool) -> nn.Module:
    """Takes a map apart by channels, or what was pooled of it, in one stage and uses the pieces in the next."""

    def compute(m: Any, x: Tensor) -> Tensor:
        y = m.first(x)
        one, other = (y.mean((2, 3), keepdim=True) if pooled else y).chunk(2, 1)
        return m.last(y[:, :2] * one + other)

    return Made(compute, first=nn.Conv2d(3, 4, 3, padding=1), last=nn.Conv2d(2, 3, 3, padding=1))


KINDS = [
    *((classifier(3), strategy, [PlannedRegion, NothingTileable]) for strategy in alone_or_teams("7")),
    (spans_first(), alone_or_teams("last")[0], [NothingTileable, PlannedRegion]),
]


@pytest.mark.parametrize(("net", "strategy", "kinds"), KINDS, ids=["alone", "teams", "after what spans the image"])
def test_a_stage_without_anything_for_boxes_is_computed_whole(net: nn.Module, strategy: Strategy, kinds: Any) -> None:
    plans = all_plans(copy.deepcopy(net).double(), strategy)
    assert [type(plan) for number in sorted(plans) for plan in plans[number]] == kinds


NOTHING = nn.Sequential(nn.Flatten(), nn.Linear(3 * 40 * 56, 4), nn.ReLU(), nn.Linear(4, 3))
SPLIT = Strategy("zero-bubble", 1, 1, M, policy=ActivationPolicy(stream=16))


@pytest.mark.parametrize(
    ("net", "strategy", "words"),
    [
        *((NOTHING, strategy, "nothing to compute box by box: .*Leave --stream out") for strategy in alone_or_teams()),
        (Gated(), SPLIT, "cannot split it as zero-bubble does"),
        (halves(pooled=False), alone_or_teams("getitem")[1], "--stream: chunk is several maps"),
        (halves(pooled=True), alone_or_teams("getitem")[1], "--stream: chunk is several tensors"),
    ],
    ids=["nothing alone", "nothing in teams", "split backward passes", "several maps", "several tensors"],
)
def test_what_boxes_cannot_do_is_refused_by_name(net: nn.Module, strategy: Strategy, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        all_plans(copy.deepcopy(net).double(), strategy)
