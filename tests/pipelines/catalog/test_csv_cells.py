"""What a spreadsheet program would compute is text in our files, and comes back as it was."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.pages.run_files import _rows
from app.training.metrics_log import MetricsLog
from app.training.run_folder import RunFolder
from app.training.validation import Scores
from pipelines.catalog.failures import FailedSlides
from pipelines.catalog.table import as_text, original, read_rows, write_rows
from pipelines.labels.splits import Splits

FORMULAS = ("=1+1", "+cmd|' /C calc'!A0", "-2+SUM(A1)", "@SUM(A1)", "\t=1", "\r=1", "'=1", "''@x", "'-b")
PLAIN = ("slide 1", "a-b", "-TCGA-AA-0001", "+49", "'quoted'", "-0.5", "1e-5", "+3", "-inf", "", "x=1")


@given(st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\0")), min_size=1))
def test_rows_come_back_as_they_were(cells: list[str]) -> None:
    file = io.StringIO(newline="")
    names = [f"c{k}" for k in range(len(cells))]
    write_rows(file, [names, cells])
    file.seek(0)
    assert list(read_rows(file)) == [dict(zip(names, cells, strict=True))]


@pytest.mark.parametrize("cell", FORMULAS)
def test_a_formula_is_marked(cell: str) -> None:
    marked = as_text(cell)
    assert isinstance(marked, str)
    assert marked == "'" + cell
    assert original(marked) == cell


def test_marks_of_older_files_are_taken_off() -> None:
    """They stood before every sign."""
    assert original("'-TCGA-1") == "-TCGA-1"


@pytest.mark.parametrize("cell", [*PLAIN, -0.5, 3, None])
def test_what_computes_nothing_stays(cell: object) -> None:
    assert as_text(cell) == cell
    assert not isinstance(cell, str) or original(cell) == cell


def cells_of(path: Path) -> list[str]:
    with path.open(newline="") as file:
        return [cell for row in csv.reader(file) for cell in row]


def test_every_file_of_a_run(tmp_path: Path) -> None:
    name = "=cmd|' /C calc'!A0"
    folder = RunFolder(tmp_path)
    failed = FailedSlides(folder.failed_slides)
    failed.add(name, "open", "@SUM(1)")
    assert failed.rows() == [(name, "open", "@SUM(1)")]
    failed.forget(["another"])
    assert failed.rows() == [(name, "open", "@SUM(1)")]
    Splits({name: "train", "b": "val"}, {name: "+patient", "b": "b"}, {name: 0, "b": 1}).save(folder.splits)
    splits = Splits.load(folder.splits)
    assert (splits.split[name], splits.patient[name]) == ("train", "+patient")
    assert Splits.load(folder.splits, {name: "p", "b": "b"}).split[name] == "train"
    with MetricsLog(folder, 0, (name, "-b"), writes=True) as log:
        log.validation(1, Scores({"loss": -0.5}, [{"slide": name, "label": "-b", "tiles": 1, "score_-b": -0.5}]))
    assert _rows(folder.predictions)[0] == {"slide": name, "label": "-b", "tiles": "1", "score_-b": "-0.5"}
    for path in (folder.failed_slides, folder.splits, folder.predictions, folder.validation):
        assert not [cell for cell in cells_of(path) if cell[:1] in ("=", "@")]
    assert "-b" in cells_of(folder.predictions)
    assert "-0.5" in cells_of(folder.validation)
