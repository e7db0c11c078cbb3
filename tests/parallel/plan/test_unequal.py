"""Plans for devices that differ: shares by speed, stages by speed, and the time of a step of both."""

from __future__ import annotations

import dataclasses

import pytest

from app.planning.command import PlanCommand
from app.planning.machine import devices_named, named_machine
from app.planning.report import report
from app.planning.unequal import unequal_notes
from app.planning.workload import Workload
from app.settings.cli import OK
from parallel.graph.partition import partition_equal
from parallel.plan.plan import PlanRow, best_of
from parallel.plan.search import Planner
from parallel.schedule.mesh import Mesh
from parallel.schedule.registry import build_schedule
from parallel.schedule.simulate import simulate
from parallel.schedule.timeline import StageCost
from parallel.strategy import Strategy

MIXED = "rtxa6000-48gb:2,rtx2080ti-11gb:2"


def planner(device: str, ranks: int, batch: int = 32) -> Planner:
    work, machine = Workload("resnet18", 256, 2, "batch", False, "sgd", None, "average"), named_machine(device, ranks)
    task = work.task(batch, machine.estimate)
    return Planner(task, dataclasses.replace(machine.cluster, speeds=machine.speeds(work.in_float32)))


def test_shares_by_speed_make_the_step_of_the_formula() -> None:
    mixed = planner(MIXED, 4)
    fast, slow = mixed.cluster.speeds[0], mixed.cluster.speeds[3]
    assert mixed.cluster.speeds == (fast, fast, 1.0, 1.0)
    assert 1.2 < fast < 3
    rows = list(mixed.search(["ddp"], ranks=4, m=32))
    equal, shared = rows
    assert [len(share) for share in shared.strategy.shares] == [10, 10, 6, 6]
    assert equal.step_s is not None
    assert shared.step_s is not None
    alone = planner("rtx2080ti-11gb", 1).forecast(Strategy("single", 1, 1, 32))
    assert alone is not None
    assert alone.step_s is not None
    each_s = alone.step_s / 32
    assert equal.step_s - shared.step_s == pytest.approx((8 / slow - max(10 / fast, 6)) * each_s, rel=0.05)
    assert best_of(rows) is shared


def test_stages_follow_the_speeds_of_their_ranks() -> None:
    mixed = planner("rtxa6000-48gb,rtx2080ti-11gb", 2)
    candidate = Strategy("1f1b", 2, 2, 16)
    uneven = mixed.forecast(candidate)
    assert uneven is not None
    costs = mixed.stages.stage_costs(uneven.strategy, mixed.partition_of(uneven))
    first, second = (cost.forward_s + cost.backward_s for cost in costs)
    fast = mixed.cluster.speeds[0]
    assert first / fast == pytest.approx(second, rel=0.25), "the first device takes more of the model"
    equal_speeds = Planner(mixed.task, dataclasses.replace(mixed.cluster, speeds=()))
    cut_alike = equal_speeds.forecast(candidate)
    assert cut_alike is not None
    as_cut = mixed.forecast(candidate, partition=equal_speeds.partition_of(cut_alike))
    assert as_cut is not None
    assert uneven.images_per_second > 1.1 * as_cut.images_per_second  # type: ignore[operator]
    assert partition_equal(mixed.task.graph, 2).starts != mixed.partition_of(uneven).starts


@pytest.mark.parametrize("name", ["master", "bidirectional"])
def test_shares_by_speed_leave_work_for_both_replicas_of_a_group(name: str) -> None:
    """Shares of 3 and 1 microbatches were timed, where the second replica of the slower group has none: KeyError."""
    mixed = planner("h100-80gb:2,rtx2080ti-11gb:2", 4, batch=8)
    rows = list(mixed.search([name], ranks=4, depth=2))
    assert rows
    assert all(len(share) >= 2 for row in rows for share in row.strategy.shares)


def test_groups_of_unequal_devices_share_by_speed() -> None:
    mixed = planner(MIXED, 4)
    rows = list(mixed.search(["gpipe"], ranks=4, depth=2, m=16))
    equal, shared = rows
    assert [len(share) for share in shared.strategy.shares] == [10, 6]
    assert shared.images_per_second > equal.images_per_second  # type: ignore[operator]
    assert 0 <= shared.bubble < 1  # type: ignore[operator]
    assert PlanRow.from_json(shared.to_json()).strategy == shared.strategy


def test_a_faster_rank_computes_faster_on_paper() -> None:
    mesh = Mesh(1, (0, 1), 1)
    schedule = build_schedule("mp-basic", mesh, 1)
    costs = [StageCost(1.0, 2.0, 0, 0, 0)] * 2
    assert simulate(schedule, mesh, costs).makespan_s == 6.0
    assert simulate(schedule, mesh, costs, speeds=[2.0, 1.0]).makespan_s == 4.5


@pytest.mark.parametrize(
    ("text", "ranks", "said"),
    [
        (MIXED, 3, "names 4 devices, one a rank: give --ranks 4"),
        ("a40-48gb:x", 2, "names devices as a40-48gb:2,t4-16gb:2; got a40-48gb:x"),
        ("a40-48gb:1,t5-16gb:1", 2, "'t5-16gb' is no device whose data sheet is known; close are t4-16gb"),
    ],
)
def test_devices_that_are_refused(text: str, ranks: int, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        devices_named(text, ranks)


def test_slow_devices_are_advised_against_where_they_add_little() -> None:
    row = PlanRow(Strategy("ddp", 2, 1, 8, shares=((0, 1, 2, 3, 4, 5, 6), (7,))), images_per_second=10.2, step_s=1.0)
    equal = PlanRow(Strategy("ddp", 2, 1, 8), images_per_second=6.0, step_s=1.0)
    lines = list(unequal_notes(["fast", "slow"], [7.0, 1.0], [equal, row], lambda _: 10.0))
    assert lines == [
        "speeds: 1 x fast 7.00, 1 x slow 1.00",
        "ddp --shares 7,1: 10.2 images/s, 1.70 times its best with equal shares; 8 microbatches follow speeds within "
        "12%",
        "without 1 x slow: 10 images/s, as many or more: leave them out",
    ]
    assert list(unequal_notes(["fast", "slow"], [7.0, 1.0], [equal, row], lambda _: 8.0))[-1].endswith("they add 27%")


def test_a_processor_beside_fast_gpus_is_advised_against(capsys: pytest.CaptureFixture[str]) -> None:
    command = PlanCommand("resnet18", 256, ranks=3, batch=48, parallel="ddp", device_spec="h100-80gb:2,epyc7742-64c:1")
    assert report(command) == OK
    said = capsys.readouterr().out
    assert "1 x epyc7742-64c 1.00" in said
    assert "without 1 x epyc7742-64c" in said
    assert said.rstrip().endswith("leave them out")
