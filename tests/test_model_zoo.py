"""The benchmark that splits every model judges rightly: what is wrong is not exact, what ends early is a row."""

from __future__ import annotations

import dataclasses
import os
import time
from pathlib import Path

import pytest
from torch import Tensor, nn
from torchvision import models

from app.training import exactness
from app.training.exactness import PlainTraining, StepOutcome
from benchmarks.model_zoo import measure, run
from benchmarks.model_zoo.grid import WAYS as GRID_WAYS
from benchmarks.model_zoo.grid import grid_entries
from benchmarks.model_zoo.run import measured
from benchmarks.model_zoo.table import Row, append, read, summary, totals
from benchmarks.model_zoo.zoo import CLASSIFIERS, GIANTS, SEGMENTERS, TIMM, Entry, all_entries

pytestmark = pytest.mark.bench

SMALL = Entry("benchmarks.exactness.models:Dropouts", "ours", 12)


class OneLayer(nn.Sequential):
    """There is nothing to cut."""

    def __init__(self, classes: int) -> None:
        super().__init__(nn.Conv2d(3, classes, 1))


class Views(nn.Module):
    """Does not run on what is channels_last."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 1), nn.Linear(4 * 64, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.second(x.view(x.shape[0], -1))


class Ends(nn.Conv2d):
    """Takes its process with it."""

    def __init__(self, classes: int) -> None:
        os._exit(7)


class Sleeps(nn.Conv2d):
    def __init__(self, classes: int) -> None:
        time.sleep(60)


def test_a_model_with_dropout_and_skips_is_exact_in_2_and_4_stages_and_recomputed() -> None:
    rows = list(measure.rows_of(SMALL))
    assert [(row.way, row.status) for row in rows] == [(way, "exact") for way in ("2 stages", "4 stages", "recompute")]
    assert rows[0].reached == "17 of 17"
    assert 0 <= rows[0].largest <= 1e-10


@pytest.mark.parametrize(
    ("kind", "name"), [("gradients", "head.weight"), ("state", "down1.1.running_mean"), ("loss", "")]
)
def test_what_differs_in_the_eighth_digit_is_wrong(monkeypatch: pytest.MonkeyPatch, kind: str, name: str) -> None:
    honest = PlainTraining.step

    def falsified(plain: PlainTraining, step: int) -> StepOutcome:
        outcome = honest(plain, step)
        if kind == "loss":
            return dataclasses.replace(outcome, loss=outcome.loss * (1 + 1e-8))
        value = (outcome.gradients if kind == "gradients" else outcome.state["model"])[name]
        value += 1e-8 * value.abs().max()
        return outcome

    monkeypatch.setattr(PlainTraining, "step", falsified)
    for row in measure.rows_of(SMALL):
        assert row.status == "wrong"
        assert 1e-10 < row.largest < 2e-8
        assert row.note.startswith(name or "loss")


def test_a_gradient_that_does_not_come_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = exactness.compare

    def forgetful(plain: StepOutcome, ranks: list[StepOutcome], *more: object, **named: object) -> exactness.Errors:
        fewer = [{n: g for n, g in rank.gradients.items() if n != "head.bias"} for rank in ranks]
        ranks = [dataclasses.replace(rank, gradients=kept) for rank, kept in zip(ranks, fewer, strict=True)]
        return honest(plain, ranks, *more, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(exactness, "compare", forgetful)
    assert [row.note.split(",")[0] for row in measure.rows_of(SMALL)] == ["head.bias 1.0e+00"] * 3


@pytest.mark.parametrize("way", ["gpipe", "master", "spatial 3x1"])
def test_the_grid_computes_pipelines_and_teams(way: str) -> None:
    (row,) = measure.rows_of(dataclasses.replace(SMALL, ways=(way,), steps=2))
    assert (row.way, row.status) == (way, "exact")
    assert row.model.endswith("at 12 px")


def test_the_grid_has_42_models_on_two_sides() -> None:
    entries = list(grid_entries())
    assert len({entry.model for entry in entries}) == 42
    assert len({entry.name for entry in entries}) == len(entries) == 84
    assert all(entry.ways == GRID_WAYS for entry in entries)


def test_a_model_that_cannot_be_cut_so_often_is_refused_with_the_reason() -> None:
    rows = list(measure.rows_of(Entry(f"{__name__}:OneLayer", "ours", 8, 1)))
    assert [row.status for row in rows] == ["refused", "refused", "exact"]
    assert "can be cut into 1 to" in rows[1].note


def test_a_model_that_views_is_computed_without_channels_last_and_the_row_says_so() -> None:
    row, *_ = measure.rows_of(Entry(f"{__name__}:Views", "ours", 8))
    assert row.status == "exact"
    assert row.note.startswith("with --no-channels-last: else RuntimeError: view size is not compatible")


def test_a_process_that_ends_or_takes_too_long_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "PRELOADED", ("torch",))
    ended = measured(Entry("tests.test_model_zoo:Ends", "ours", 8, 1), 60)
    assert [(row.way[0], row.status, row.note) for row in ended] == [(way, "died", "exit code 7") for way in "24r"]
    late = measured(Entry("tests.test_model_zoo:Sleeps", "ours"), 0.05)
    assert [(row.status, row.note) for row in late] == [("late", "not done within 0.05 s")] * 3


def test_the_last_row_of_a_model_counts(tmp_path: Path) -> None:
    failed = Row("torchvision:a", "2 stages", "torchvision", "failed", "float64", 64, 2, note="why, and how")
    exact = dataclasses.replace(failed, status="exact", loss=1e-13, parameters=7, peak_gib=0.5, note="")
    other = failed.at("4 stages")
    for row in (failed, other, exact):
        append(tmp_path / "rows.csv", row)
    assert read(tmp_path / "rows.csv") == {("torchvision:a", "2 stages"): exact, ("torchvision:a", "4 stages"): other}


def test_the_summary_counts_a_model_only_when_it_is_exact_in_both() -> None:
    row = Row("torchvision:a", "2 stages", "torchvision", "exact", "float64", 64, 2, gradients=2e-12)
    rows = [row, row.at("4 stages"), dataclasses.replace(row, model="torchvision:b")]
    rows.append(dataclasses.replace(rows[-1].at("4 stages"), status="wrong", note="of x|y"))
    rows.append(Row("timm:a", "2 stages", "timm", "late", "float64", 64, 2))
    text = summary(rows, 3)
    assert "2 of 3 models" not in text
    assert "3 models. Largest relative error of what is exact: float64 2.0e-12" in text
    assert "of x/y" in text
    assert "torchvision 1 of 2 models exact in 2 and 4 stages (rows: 3 exact, 1 wrong); timm 0 of 1" in totals(rows)


def test_the_table_has_every_classifier_once_and_fifty_of_timm() -> None:
    entries = list(all_entries())
    assert len({entry.name for entry in entries}) == len({entry.model for entry in entries}) == len(entries)
    names = set(models.list_models(module=models))
    ours = {entry.model.partition(":")[2] for entry in entries if entry.model.startswith("torchvision:")}
    assert ours == (names - set(GIANTS)) | set(SEGMENTERS)
    assert set(CLASSIFIERS) <= names
    assert len(set(TIMM)) == 50
