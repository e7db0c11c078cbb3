"""Collections: labels, patients, growing, going on, and refusing to write over something else."""

from __future__ import annotations

import csv
import dataclasses
import errno
from collections import Counter
from pathlib import Path

import pytest
import tifffile

from pipelines.synthetic import collection as module
from pipelines.synthetic.collection import Collection, make_collection, planned

SMALL = Collection("classify", 4, 600, 7, 0.5)


def _make(collection: Collection, out: Path) -> int:
    return make_collection(collection, out, workers=1, report=lambda slide, done, total: None)


def test_classes_and_patients_are_even() -> None:
    plan = planned(dataclasses.replace(SMALL, slides=100))
    for n in range(2, 101, 2):
        labels = Counter(slide.label for slide in plan[:n])
        assert abs(labels["even"] - labels["grouped"]) <= 0
    classes = {patient: {s.label for s in plan if s.patient == patient} for patient in {s.patient for s in plan}}
    assert all(len(labels) == 1 for labels in classes.values())
    assert set(Counter(slide.patient for slide in plan).values()) == {1, 2}


def test_a_collection_grows_without_changing(tmp_path: Path) -> None:
    assert _make(dataclasses.replace(SMALL, slides=2), tmp_path) == 2
    before = {path.name: path.read_bytes() for path in tmp_path.glob("*.tif")}
    assert _make(SMALL, tmp_path) == 2
    assert {name: (tmp_path / name).read_bytes() for name in before} == before
    with (tmp_path / "labels.csv").open() as table:
        rows = list(csv.DictReader(table))
    assert [row["slide"] for row in rows] == [f"slide_{k:04d}" for k in range(4)]
    assert {row["label"] for row in rows} == {"even", "grouped"}
    assert _make(dataclasses.replace(SMALL, slides=1), tmp_path) == 0
    assert len((tmp_path / "labels.csv").read_text().splitlines()) == 5


def test_segment_writes_masks_and_patients_and_no_labels(tmp_path: Path) -> None:
    _make(Collection("segment", 1, 1000, 7, 0.5), tmp_path)
    mask = tifffile.imread(tmp_path / "annotations" / "slide_0000.tif")
    assert set(mask.ravel()) == {0, 1}
    assert (tmp_path / "annotations" / "classes.txt").read_text() == "0 background\n1 gland\n"
    assert (tmp_path / "labels.csv").read_text().startswith("slide,patient\n")


def test_another_collection_is_refused(tmp_path: Path) -> None:
    _make(dataclasses.replace(SMALL, slides=1), tmp_path)
    for field, value in {"seed": 8, "size": 700, "mpp": 0.25, "task": "segment"}.items():
        with pytest.raises(ValueError, match=f"other artificial slides \\({field} "):
            _make(dataclasses.replace(SMALL, slides=1, **{field: value}), tmp_path)


def test_someone_elses_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "slide_0001.tif").write_bytes(b"a real slide")
    with pytest.raises(ValueError, match=r"slide_0001\.tif is there already and was not made by app\.synth"):
        _make(SMALL, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["slide_0001.tif"]


def test_a_full_disk_leaves_whole_slides_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tile = module.paint.__globals__["TiffWriter"].write_tile
    written = Counter[str]()

    def until_full(self: object, *tile: object) -> None:
        written["tiles"] += 1
        if written["tiles"] > 15:  # a slide of 600 px has 9 tiles on level 0 and 4 on level 1
            raise OSError(errno.ENOSPC, "No space left on device")
        write_tile(self, *tile)

    monkeypatch.setattr(module.paint.__globals__["TiffWriter"], "write_tile", until_full)
    with pytest.raises(OSError, match="is full"):
        _make(SMALL, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["labels.csv", "slide_0000.tif", "synthetic.json"]
    monkeypatch.undo()
    assert _make(SMALL, tmp_path) == 3


def test_a_file_in_place_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("")
    with pytest.raises(OSError, match="cannot be written"):
        _make(SMALL, tmp_path / "out")
