"""Reading: pixels land in the given array, and what cannot be read is replaced the same way everywhere."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from pipelines.catalog.handles import SlidePool
from pipelines.slides.geometry import Region
from pipelines.slides.slide import SlideError
from pipelines.stream.batch import Labels
from pipelines.stream.read import MAX_FAULTS, MAX_FAULTS_PER_SLIDE, FaultLog, Read
from pipelines.tiles.index import TileTable
from tests.helpers.tiles import TILE, MemorySpec, memory_specs, tile_table


def reader(table: TileTable, bad: dict[str, set[int]], lost: set[str]) -> tuple[Read, SlidePool]:
    def damage(spec: MemorySpec) -> MemorySpec:
        return replace(spec, bad=frozenset(bad.get(spec.slide_id, ())), opens=spec.slide_id not in lost)

    pool = SlidePool(memory_specs(table, damage), 2)
    return Read(table, pool, None), pool


def fill(read: Read, row: int, log: FaultLog | None = None) -> tuple[int, int, int, int]:
    """Row used, slide and tile that the pixels tell, and the target."""
    image, target = np.zeros((TILE, TILE, 3), np.uint8), np.zeros((), np.int64)
    used = read.fill(0, row, Labels(np.arange(len(read.tiles)) * 10), image, target, log or FaultLog(None))
    assert (image[..., 0] == image[0, 0, 0]).all()
    assert (image[..., 1] == image[0, 0, 1]).all()
    return used, int(image[0, 0, 0]), int(image[0, 0, 1]), int(target)


def test_a_whole_tile_is_read_as_it_is() -> None:
    read, _ = reader(tile_table([3, 4]), {}, set())
    assert fill(read, 5) == (5, 1, 2, 50)


def test_a_bad_tile_is_replaced_by_the_next_of_its_slide_and_the_target_follows() -> None:
    read, _ = reader(tile_table([3, 4]), {"s0": {1}, "s1": {2, 3}}, set())
    assert fill(read, 1) == (2, 0, 2, 20)
    assert fill(read, 5) == (3, 1, 0, 30)  # around the end of the slide


def test_a_lost_slide_is_replaced_by_the_next_slide_at_once() -> None:
    told: list[tuple[str, Region | None]] = []
    read, _ = reader(tile_table([3, 4, 2]), {}, {"s1", "s2"})
    log = FaultLog(lambda slide_id, region, error: told.append((slide_id, region)))
    assert fill(read, 4, log) == (0, 0, 0, 0)
    assert told == [("s1", None), ("s2", None)]


def test_after_some_bad_tiles_the_next_slide_is_tried() -> None:
    read, _ = reader(tile_table([50, 2]), {"s0": set(range(50))}, set())
    told: list[Region | None] = []
    assert fill(read, 7, FaultLog(lambda slide_id, region, error: told.append(region)))[0] == 50
    assert len(told) == MAX_FAULTS_PER_SLIDE


def test_each_fault_is_told_once() -> None:
    table = tile_table([3])
    told: list[tuple[str, Region | None, str]] = []
    read, _ = reader(table, {"s0": {1}}, set())
    log = FaultLog(lambda slide_id, region, error: told.append((slide_id, region, str(error))))
    for _ in range(3):
        fill(read, 1, log)
    assert told == [("s0", table.region(1), "s0: bad tile at 8")]


def test_a_failed_handle_is_opened_anew() -> None:
    table = tile_table([3])
    specs = memory_specs(table, lambda spec: replace(spec, bad=frozenset({1})))
    read = Read(table, SlidePool(specs, 2), None)
    fill(read, 1)
    assert specs[0].opened == ["s0", "s0"]


def test_a_table_without_readable_tiles_is_an_error_that_names_them() -> None:
    read, _ = reader(tile_table([2, 1]), {"s0": {0, 1}}, {"s1"})
    with pytest.raises(SlideError, match=r"in place of row 0 .*3 tried(.|\n)*s0: bad tile at 8(.|\n)*s1 does not open"):
        fill(read, 0)


def test_replacements_are_bounded() -> None:
    table = tile_table([1] * (MAX_FAULTS + 5))
    read, _ = reader(table, {}, {f"s{k}" for k in range(MAX_FAULTS)})
    with pytest.raises(SlideError, match=f"{MAX_FAULTS} tried"):
        fill(read, 0)
    assert fill(read, 1)[0] == MAX_FAULTS


def test_rows_of_a_slide_need_not_be_together_in_the_table() -> None:
    table = tile_table([3, 3]).select(np.array([0, 3, 1, 4, 2, 5]))
    read, _ = reader(table, {"s1": {1}}, set())
    assert fill(read, 3)[:3] == (5, 1, 2)


def test_other_errors_are_not_taken_for_damage() -> None:
    table = tile_table([2])
    finer = TileTable(table.slides, table.slide, table.l0_x, table.l0_y, table.tissue, replace(table.settings, mpp=0.1))
    read, _ = reader(finer, {}, set())
    with pytest.raises(ValueError, match=r"mpp 0\.1 cannot be had"):
        fill(read, 0)
