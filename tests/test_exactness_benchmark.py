"""The benchmark of exactness judges rightly: what differs is inexact, and what ends early is a row."""

from __future__ import annotations

import dataclasses
import os
import time
from typing import Any

import pytest
from torch import nn

from app.training import exactness
from app.training.plain_training import PlainTraining, StepOutcome
from benchmarks.exactness import measure
from benchmarks.exactness.cells import TABLES, ZOO_WAYS, Cell, entry_cells
from benchmarks.exactness.run import summary
from benchmarks.exactness.zoo import Entry

pytestmark = pytest.mark.bench

SMALL = Entry("benchmarks.exactness.models:Dropouts", "ours", 12)


class OneLayer(nn.Sequential):
    """There is nothing to cut."""

    def __init__(self, classes: int) -> None:
        super().__init__(nn.Conv2d(3, classes, 1))


class Ends(nn.Conv2d):
    """Takes its process with it."""

    def __init__(self, classes: int) -> None:
        os._exit(7)


class Sleeps(nn.Conv2d):
    def __init__(self, classes: int) -> None:
        time.sleep(60)


def cells_of(entry: Entry, ways: tuple[str, ...] = ZOO_WAYS) -> list[Cell]:
    return list(entry_cells("zoo", entry, ways))


def rows_of(entry: Entry) -> list[measure.Row]:
    rows = [measure.row_of(cell) for cell in cells_of(entry)]
    return [row for row in rows if row is not None]


def test_a_model_with_dropout_and_skips_is_exact_in_2_and_4_stages_and_recomputed() -> None:
    rows = rows_of(SMALL)
    assert [(row["way"], row["status"]) for row in rows] == [(way, "passed") for way in ZOO_WAYS]
    assert all(0 <= measure.largest(row) <= 1e-10 for row in rows)


@pytest.mark.parametrize(
    ("kind", "name"), [("gradients", "head.weight"), ("state", "down1.1.running_mean"), ("loss", "")]
)
def test_what_differs_in_the_eighth_digit_is_inexact(monkeypatch: pytest.MonkeyPatch, kind: str, name: str) -> None:
    honest = PlainTraining.step

    def falsified(plain: PlainTraining, step: int) -> StepOutcome:
        outcome = honest(plain, step)
        if kind == "loss":
            return dataclasses.replace(outcome, loss=outcome.loss * (1 + 1e-8))
        value = (outcome.gradients if kind == "gradients" else outcome.state["model"])[name]
        value += 1e-8 * value.abs().max()
        return outcome

    monkeypatch.setattr(PlainTraining, "step", falsified)
    for row in rows_of(SMALL):
        assert row["status"] == "inexact"
        assert 1e-10 < measure.largest(row) < 2e-8
        assert row["note"].startswith(name or "loss")


def test_a_gradient_that_does_not_come_is_inexact(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = exactness.compare

    def forgetful(plain: StepOutcome, ranks: list[StepOutcome], *more: object, **named: object) -> exactness.Errors:
        fewer = [{n: g for n, g in rank.gradients.items() if n != "head.bias"} for rank in ranks]
        ranks = [dataclasses.replace(rank, gradients=kept) for rank, kept in zip(ranks, fewer, strict=True)]
        return honest(plain, ranks, *more, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(exactness, "compare", forgetful)
    assert [row["note"].split(",")[0] for row in rows_of(SMALL)] == ["head.bias 1.0e+00"] * 3


def test_cells_of_a_table_have_names_of_their_own() -> None:
    for name, cells in TABLES.items():
        names = [str(cell) for cell in cells()]
        assert len(set(names)) == len(names), name


def test_a_model_that_cannot_be_cut_so_often_is_refused_with_the_reason() -> None:
    rows = rows_of(Entry(f"{__name__}:OneLayer", "ours", 8, 1))
    assert [row["status"] for row in rows] == ["refused", "refused", "passed"]
    assert "can be cut into 1 to" in rows[1]["note"]


def test_a_process_that_ends_or_takes_too_long_is_a_row() -> None:
    first, second, *_ = cells_of(Entry("tests.test_exactness_benchmark:Ends", "ours", 8, 1))
    ended = list(measure.measured([first, second], 60))
    assert [(row["way"], row["status"]) for row in ended] == [(way, "failed") for way in ZOO_WAYS[:2]]
    assert all("exit code" in row["note"] for row in ended)
    (late,) = measure.measured(cells_of(Entry("tests.test_exactness_benchmark:Sleeps", "ours"))[:1], 0.05)
    assert (late["status"], late["note"]) == ("failed", "RuntimeError: still running after 0 s")


def test_the_summary_counts_cells_and_lists_those_that_did_not_pass() -> None:
    row: dict[str, Any] = {"cell": "zoo / a / 2 stages", "model": "a", "way": "2 stages", "dtype": "float64"}
    row |= {"status": "passed", "seconds": 1.0, "note": "", **dict.fromkeys(measure.ERRORS, 2e-12)}
    wrong = {**row, "cell": "zoo / a / 4 stages", "way": "4 stages", "status": "inexact", "note": "of x|y"}
    text = summary([row, wrong], 3)
    assert "2.0e-12 (1 of 1)" in text
    assert "2.0e-12 (0 of 1)" in text
    assert "2 of 3 cells: 1 passed, 0 refused, 1 inexact, 0 failed" in text
    assert "of x/y" in text
