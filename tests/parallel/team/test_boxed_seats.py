"""Teams of schedules whose members compute their parts in boxes: the loss, gradients, running statistics,
updates and predictions of the plain step."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from app.training.exactness import CroppedImages
from benchmarks.in_boxes import planned_regions
from benchmarks.whole_engine import whole_engine
from models.losses import PixelClassLoss
from parallel.comm.communicator import Communicator
from parallel.comm.local import LocalCommunicator
from parallel.comm.thread_comm import run_on_threads
from parallel.engine.engine import Engine
from parallel.graph.partition import Partition
from parallel.memory.policy import ActivationPolicy
from parallel.space.team import Grid
from parallel.strategy import Strategy
from parallel.streaming.read_region import NothingInBoxes
from parallel.team.boxed_nodes import BoxedParts, PlannedRegion
from parallel.team.team_comm import TeamComm
from parallel.team.team_plan import TeamPlans
from parallel.team.team_stages import team_stages
from parallel.trace.trace import trace_as_it_runs
from tests.helpers import engine_runs
from tests.helpers.engine_runs import assert_equal, on_threads, plain, run, steps_of
from tests.helpers.plain_step import plain_run
from tests.helpers.ranks import run_on_ranks
from tests.helpers.small_nets import ALL_NETS, batch_of
from tests.helpers.tiny_models import classifier
from tests.parallel.engine.test_teams import of_teams
from tests.parallel.streaming.test_streamed_stages import SHAPE, M, engine_of, gated, sgd, steps

STRIPS, COLUMNS, QUARTERS = Grid(2, 1), Grid(1, 2), Grid(2, 2)
BOXES = ActivationPolicy(stream=4)
GROUPS = of_teams("1f1b", COLUMNS, groups=2, policy=ActivationPolicy(stream=4, optimizer=True))
PIPELINE = of_teams("1f1b", STRIPS, policy=BOXES)


@pytest.mark.parametrize(
    ("net", "strategy"),
    [
        ("skips", PIPELINE),
        ("skips", GROUPS),
        ("skips", of_teams("gpipe", QUARTERS, policy=BOXES)),
        ("skips", of_teams("interleaved", STRIPS, policy=BOXES)),
        ("skips", of_teams("master", COLUMNS, policy=BOXES)),
        ("skips", of_teams("bidirectional", STRIPS, 3, policy=BOXES)),
        ("skips", of_teams("spatial", COLUMNS, groups=2, policy=BOXES)),
        ("two-outputs", of_teams("mp-basic", STRIPS, policy=BOXES)),
        ("two-outputs", of_teams("mast", QUARTERS, m=2, policy=BOXES)),
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


def seats_of(name: str, grid: Grid, cuts: tuple[str, ...] = (), **policy: Any) -> Strategy:
    policy_ = ActivationPolicy(stream=16, **policy)
    return Strategy(name, 2 * grid.members, 2, M, cuts=cuts, policy=policy_, grid=grid)


Plans = dict[int, list[PlannedRegion | NothingInBoxes]]
"""By stage: what its training pass has in boxes, of sums and of maps."""
Result = tuple[float, dict[str, Tensor], list[Tensor], Plans]


def gated_steps(communicator: Communicator, given: tuple[Strategy, dict[str, Tensor]]) -> Result:
    strategy, state = given
    module = gated()
    module.load_state_dict(state)  # ranks that are threads draw from one generator at once
    engine = engine_of(module, communicator, strategy)
    loss, gradients, _, predicted = steps(engine, CroppedImages)
    return loss, gradients, predicted, planned(engine)


def planned(engine: Engine) -> Plans:
    return {number: planned_regions(stage.module, SHAPE) for number, stage in engine._work.stages.items()}


@pytest.mark.parametrize(
    ("strategy", "given"),
    [
        (seats_of("1f1b", STRIPS, cuts=("squeeze.1",)), "squeeze_0"),
        (seats_of("gpipe", QUARTERS, cuts=("mul",), host_bytes=1), "squeeze_2"),
    ],
    ids=["a gate from a pooled map", "a gate, its map, few stored maps"],
)
def test_gates_images_and_sums_of_the_loss_pass_between_teams(strategy: Strategy, given: str) -> None:
    module = gated()
    state = {name: value.clone() for name, value in module.state_dict().items()}
    alone = whole_engine(module, PixelClassLoss(), sgd, LocalCommunicator(), batch=M, m=M, shape=SHAPE)
    loss, gradients, _, predicted = steps(alone, lambda tensor: tensor)
    largest = max(float(gradient.abs().max()) for gradient in gradients.values())
    found: dict[str, Tensor] = {}
    seen: list[list[Tensor]] = []
    for ours in run_on_threads(strategy.ranks, gated_steps, (strategy, state)):
        assert ours[0] == pytest.approx(loss, rel=1e-10)
        for key, gradient in ours[1].items():
            torch.testing.assert_close(gradient, gradients[key], rtol=1e-10, atol=1e-10 * largest)
        found |= ours[1]
        seen += [ours[2]] if ours[2] else []
        for number, plans in ours[3].items():
            assert all(isinstance(plan, PlannedRegion) for plan in plans), number
            if number:
                assert [plan.run.region.given for plan in plans] == [(given,)] * 2  # type: ignore[union-attr]
                assert any(plan.sums for plan in plans)  # type: ignore[union-attr]
    assert found.keys() == gradients.keys()
    assert seen
    for output, sums in seen:
        torch.testing.assert_close(output, predicted[0], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(sums, predicted[1], rtol=1e-6, atol=1e-5)


def plans_of(communicator: Communicator, given: tuple[nn.Module, Strategy]) -> Plans:
    return planned(engine_of(copy.deepcopy(given[0]), communicator, given[1]))


def all_plans(module: nn.Module, strategy: Strategy) -> Plans:
    found: Plans = {}
    for member in run_on_threads(strategy.ranks, plans_of, (module.double(), strategy)):
        found |= member
    return found


def test_boxes_are_those_of_the_tile_in_stages_of_smaller_maps() -> None:
    """A box of 16 px of the tile, 40 x 56 px, is one of 8 px of maps half as large: two rows of boxes a member."""
    (plan,) = all_plans(gated(), seats_of("1f1b", STRIPS, cuts=("middle",)))[1]
    assert isinstance(plan, PlannedRegion)
    assert plan.run.boxes.model.side == (40, 56)
    assert len(plan.run.phases[0].parts[0].places) == 2 * 4


def test_a_stage_without_anything_for_boxes_is_computed_at_once() -> None:
    first, last = (all_plans(classifier(3), seats_of("1f1b", STRIPS, cuts=("7",)))[k] for k in range(2))
    assert isinstance(first[0], PlannedRegion)
    assert [type(plan) for plan in last] == [NothingInBoxes]


def test_boxes_are_on_the_device_of_their_stage() -> None:
    """Regions are read, and planned, while the model still lies on the CPU."""
    shape, traced, device = (
        (1, 3, 32, 32),
        trace_as_it_runs(classifier(3), (1, 3, 32, 32), torch.float32),
        torch.device("cuda"),
    )

    def member(communicator: Communicator, _: None) -> set[torch.device]:
        own = copy.deepcopy(traced)
        plans, whole = functools.partial(TeamPlans(own, once=False).plan, STRIPS), Partition(own.graph, (0,))
        comm = TeamComm(communicator)
        stage = team_stages(own, whole, [0], STRIPS, comm, plans, device, boxed=BoxedParts(8))[0].train()
        plan = stage._run_training.nodes.planned(stage, plans(shape, True), ())  # type: ignore[union-attr]
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
        all_plans(Halves(pooled), seats_of("1f1b", STRIPS, cuts=("getitem",)))


def test_no_stage_at_all_is_an_error() -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(3 * 40 * 56, 4), nn.ReLU(), nn.Linear(4, 3))
    with pytest.raises(NothingInBoxes, match=r"finds nothing to compute box by box: .*Leave --stream out"):
        all_plans(net, seats_of("1f1b", STRIPS))
