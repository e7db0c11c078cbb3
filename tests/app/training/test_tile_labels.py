"""Tiles that get their class from what is drawn on them, as ``app.train --task classify`` prepares them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from app.settings.run import DataSettings, RunConfig
from app.training.dataset import Dataset, prepare
from app.training.run_folder import RunFolder
from pipelines.catalog.catalog import find_slides
from pipelines.catalog.failures import FailedSlides
from pipelines.tiles.index_settings import IndexSettings
from tests.helpers.drawings import box, write_geojson

HALF = 768


def prepared(
    slides: Path, folder: Path, said: list[str] | None = None, more: Sequence[dict[str, Any]] = (), **data: object
) -> Dataset:
    for spec in find_slides(slides):
        write_geojson(
            folder / "drawn" / f"{spec.slide_id}.geojson",
            box(0, 0, HALF + 64, 2 * HALF, "Tumor"),  # a quarter of the tiles to the right of the middle
            box(HALF, HALF, 2 * HALF, 2 * HALF, "Ignore*"),
            *more,
        )
    settings = DataSettings(slides, annotations=folder / "drawn", task="classify")
    config = RunConfig(dataclasses.replace(settings, **data), IndexSettings(tile=256), out=folder / "run")  # type: ignore[arg-type]
    return prepare(config, RunFolder(config.out), lambda line: said.append(str(line)) if said is not None else None)


@pytest.mark.parametrize(("rule", "quarter"), [("any", 1), ("0.3", 0)])
def test_rules_and_ignored_tiles(segment_slides: Path, tmp_path: Path, rule: str, quarter: int) -> None:
    said: list[str] = []
    dataset = prepared(segment_slides, tmp_path, said, tile_label=rule)
    assert dataset.tile_labels is not None
    tiles = [dataset.tiles.region(row) for row in range(len(dataset.tiles))]
    assert not any(tile.l0_x >= HALF and tile.l0_y >= HALF for tile in tiles)
    assert any("as all that is drawn there is to be ignored" in line for line in said)
    expected = [1 if tile.l0_x < HALF else quarter if tile.l0_x == HALF else 0 for tile in tiles]
    np.testing.assert_array_equal(dataset.tile_labels, expected)
    assert set(expected) == {0, 1}


def test_any_counts_a_single_pixel(segment_slides: Path, tmp_path: Path) -> None:
    dots = [box(x, 130, x + 1, 131, "Dot") for x in range(HALF + 256 + 101, 2 * HALF, 256)]
    dataset = prepared(segment_slides, tmp_path, more=dots, tile_label="any")
    assert dataset.tile_labels is not None
    tiles = [dataset.tiles.region(row) for row in range(len(dataset.tiles))]
    dotted = [tile.l0_y == 0 and tile.l0_x > HALF for tile in tiles]
    assert any(dotted)
    np.testing.assert_array_equal(dataset.tile_labels == dataset.classes.index("Dot"), dotted)


def test_settings_that_do_not_fit_are_refused(classify_slides: Path, segment_slides: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--class-map names tumor, .*; classes are Ignore"):
        prepared(segment_slides, tmp_path / "a", class_map=("tumor=x",))
    with pytest.raises(ValueError, match="--tile-label any is for --task classify with annotations; got --task seg"):
        prepared(segment_slides, tmp_path / "b", tile_label="any", task="segment")
    with pytest.raises(ValueError, match="--class-map names a, which no label or annotation has"):
        prepared(classify_slides, tmp_path / "c", annotations=None, task="auto", class_map=("a=b",))
    faults = DataSettings(tmp_path, class_map=("a",), tile_label="most").validate()
    assert [fault.split()[0] for fault in faults] == ["--class-map", "--tile-label"]


def test_an_annotation_off_its_slide_costs_that_slide(
    segment_slides: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Such a slide was once learned as background, without a word."""
    off, *others = [spec.slide_id for spec in find_slides(segment_slides)]
    write_geojson(tmp_path / "drawn" / f"{off}.geojson", box(90_000, 90_000, 90_100, 90_100, "Tumor"))
    for slide in others:
        write_geojson(tmp_path / "drawn" / f"{slide}.geojson", box(0, 0, HALF, HALF, "Tumor"))
    data = DataSettings(segment_slides, annotations=tmp_path / "drawn")
    config = RunConfig(data, IndexSettings(tile=256), out=tmp_path / "run")
    dataset = prepare(config, RunFolder(config.out), lambda line: None)
    assert off not in dataset.tiles.slides
    assert set(dataset.tiles.slides) == set(others)
    [(slide, step, error)] = FailedSlides(tmp_path / "run" / "failed_slides.csv").rows()
    assert (slide, step) == (off, "annotation")
    assert "completely outside" in error
    assert f"{off} is left out" in caplog.text
