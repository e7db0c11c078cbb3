"""The benchmark of exactness judges rightly: what differs is inexact, and what ends early is a row."""

from __future__ import annotations

import dataclasses
import os
import time

import pytest
from torch import nn

from app.training import exactness
from app.training.plain_training import PlainTraining, StepOutcome
from benchmarks.exactness import measure
from benchmarks.exactness.cells import ZOO_WAYS, Cell, entry_cells
from benchmarks.exactness.zoo import Entry

pytestmark = pytest.mark.bench

SMALL = Entry("benchmarks.exactness.models:Dropouts", "ours", 12)


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


def test_a_process_that_ends_or_takes_too_long_is_a_row() -> None:
    first, second, *_ = cells_of(Entry("tests.test_exactness_benchmark:Ends", "ours", 8, 1))
    ended = list(measure.measured([first, second], 60))
    assert [(row["way"], row["status"]) for row in ended] == [(way, "failed") for way in ZOO_WAYS[:2]]
    assert all("exit code" in row["note"] for row in ended)
    (late,) = measure.measured(cells_of(Entry("tests.test_exactness_benchmark:Sleeps", "ours"))[:1], 0.05)
    assert (late["status"], late["note"]) == ("failed", "RuntimeError: still running after 0 s")
