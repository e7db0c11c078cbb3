"""Ranks that share a device: no faster than the device, and no slower than one rank after the other."""

from __future__ import annotations

from typing import Any

import pytest

from parallel.schedule.passes import lower
from parallel.schedule.registry import SCHEDULES, build_schedule, mesh_for
from parallel.schedule.simulate import Device, simulate
from parallel.schedule.timeline import LinkCost, StageCost

COST = StageCost(1.0, 2.0, 1.0, 1.0, 10)
LINKS = {(stage, stage + 1): LinkCost(0.01, 0.01) for stage in range(7)}


def case(name: str, depth: int, m: int) -> Any:
    mesh = mesh_for(name, groups=1, depth=depth, chunks=2 if name == "interleaved" else 1)
    links = {pair: cost for pair, cost in LINKS.items() if pair[1] < mesh.stages}
    schedule = lower(build_schedule(name, mesh, m), mesh, dict.fromkeys(links, True))
    return schedule, mesh, [COST] * mesh.stages, links


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_lane_for_every_rank_is_a_device_of_its_own(name: str) -> None:
    given = case(name, 4, 2 if name == "mast" else 8)
    shared = simulate(*given, devices=[Device((0, 1, 2, 3), 4)])
    alone = simulate(*given)
    assert shared.makespan_s == pytest.approx(alone.makespan_s)
    assert shared.peak_bytes == alone.peak_bytes


@pytest.mark.parametrize("name", SCHEDULES)
def test_one_lane_does_all_the_work_one_after_the_other(name: str) -> None:
    m = 2 if name == "mast" else 8
    schedule, mesh, costs, links = case(name, 4, m)
    shared = simulate(schedule, mesh, costs, links, devices=[Device((0, 1, 2, 3), 1)])
    work = m * mesh.stages * 3.0
    assert work * 0.999 <= shared.makespan_s <= work + 0.2 * m


def test_two_ranks_at_once_take_twice_as_long() -> None:
    """gpipe on two ranks, two microbatches: rank 0 computes alone for 1 s, then both share."""
    schedule, mesh, costs, _ = case("gpipe", 2, 2)
    shared = simulate(schedule, mesh, costs, {(0, 1): LinkCost(0, 0)}, devices=[Device((0, 1), 1)])
    first = [span for span in shared.spans[0] if str(span.action) == "0F1"]
    assert (first[0].start_s, first[0].end_s) == (1.0, 3.0)


def test_devices_do_not_share_with_each_other() -> None:
    given = case("1f1b", 4, 8)
    apart = simulate(*given, devices=[Device((k,), 1) for k in range(4)])
    assert apart.makespan_s == pytest.approx(simulate(*given).makespan_s)
