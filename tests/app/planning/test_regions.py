"""Which way is needed at which side: curves that rise, regions in order, the count of branches, and both pictures."""

from __future__ import annotations

import functools
import itertools
from pathlib import Path
from xml.etree import ElementTree

import pytest

from app.planning.command import PlanCommand
from app.planning.region_pictures import LIMITS, write_regions
from app.planning.regions import MemoryCurve, branches, memory_curves, regions
from app.planning.report import machine_of, planner_for, workload_of
from parallel.plan.search import Planner

GIB = 1 << 30
CURVES = [
    MemoryCurve("ddp", 0, ((512, 4 * GIB), (1024, 16 * GIB), (2048, 64 * GIB))),
    MemoryCurve("ddp, recomputed", 0, ((512, GIB), (1024, 4 * GIB), (2048, 16 * GIB)), faint=True),
    MemoryCurve("1f1b", 1, ((512, 2 * GIB), (1024, 8 * GIB), (2048, 32 * GIB))),
    MemoryCurve("boxes", 2, ((1024, GIB), (2048, GIB))),
]


def planners(ranks: int, model: str = "resnet18") -> functools._lru_cache_wrapper[Planner | None]:
    command = PlanCommand(model=model, tile=512, ranks=ranks, batch=4, device_spec="v100-16gb")
    machine = machine_of(command)
    work = workload_of(command, machine)
    return functools.cache(lambda tile: planner_for(command, machine, work.at(tile)))


def test_bytes_between_two_sides_are_in_proportion_to_the_px() -> None:
    ddp, *_, boxes = CURVES
    assert ddp.reach(16 * GIB) == 1024
    assert ddp.reach(40 * GIB) == pytest.approx((1024**2 + 0.5 * (2048**2 - 1024**2)) ** 0.5)
    assert ddp.reach(GIB) == 0
    assert ddp.reach(100 * GIB) == boxes.reach(2 * GIB) == 2048


def test_each_region_begins_where_the_way_before_it_ends() -> None:
    found = regions(CURVES, 16 * GIB)
    assert found[0] == (0, 512, 1024)  # recomputation moves no region
    assert [family for family, _, _ in found] == [0, 1, 2]
    assert all(before[2] == after[1] for before, after in itertools.pairwise(found))
    assert [family for family, _, _ in regions(CURVES, 2 * GIB)] == [2]
    assert regions(CURVES, GIB // 2) == []


def test_splits_and_boxes_reach_further_than_data_parallelism() -> None:
    curves = {curve.name: curve for curve in memory_curves(planners(4), 4)}
    assert list(curves) == ["ddp", "ddp, recomputed by blocks", "1f1b", "master", "spatial", "ddp in boxes of 512 px"]
    for curve in curves.values():
        sizes = [size for _, size in curve.points]
        assert sizes == sorted(sizes) or max(sizes) < 1.1 * min(sizes)  # boxes take as much at any side
    reach = {name: curve.reach(LIMITS[0]) for name, curve in curves.items()}
    assert reach["ddp"] < reach["ddp, recomputed by blocks"]
    assert reach["ddp"] < reach["master"]  # 1f1b holds several microbatches of its first stage
    assert reach["ddp"] < reach["spatial"] < reach["ddp in boxes of 512 px"]


def test_the_curve_of_data_parallelism_is_that_of_the_planner() -> None:
    planner_at = planners(2)
    ddp, *_ = memory_curves(planner_at, 2)
    planner = planner_at(1024)
    assert planner is not None
    row = planner.smallest_memory("ddp", 2)
    assert row is not None
    assert dict(ddp.points)[1024] == planner.cluster.needed_bytes(max(row.peak_bytes))


@pytest.mark.parametrize(("model", "count"), [("torchvision:vgg11", 1), ("resnet18", 1), ("torchvision:googlenet", 4)])
def test_branches(model: str, count: int) -> None:
    planner = planners(1, model)(512)
    assert planner is not None
    assert branches(planner.task.graph) == count


def texts(path: Path) -> str:
    return " ".join(ElementTree.parse(path).getroot().itertext())


def test_pictures_and_a_line_for_each_device(tmp_path: Path) -> None:
    lines = list(write_regions(tmp_path, planners(2), model="resnet18", tile=512, ranks=2))
    assert [line.split(" a device")[0] for line in lines] == ["16 GiB", "32 GiB", "80 GiB"]
    assert all("data parallelism to" in line and "splitting to" in line for line in lines)
    assert {path.name for path in tmp_path.iterdir()} == {"memory.svg", "map.svg"}
    said = texts(tmp_path / "memory.svg")
    for words in ("resnet18", "2 ranks", "splitting: 1f1b", "splitting: spatial", "streaming: ", "80 GiB", "2048"):
        assert words in said
    said = texts(tmp_path / "map.svg")
    for words in ("resnet18: 11.2 million, 1", "in-core", "out-of-core", "fits 16 GiB below", "branches", "512 px"):
        assert words in said


def test_one_rank_has_no_splits(tmp_path: Path) -> None:
    lines = list(write_regions(tmp_path, planners(1), model="resnet18", tile=512, ranks=1))
    assert not any("splitting" in line for line in lines)
    assert "splitting" not in texts(tmp_path / "memory.svg")
