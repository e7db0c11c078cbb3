"""The benchmark that splits every model judges rightly: what is wrong is not passed, what ends early is a row."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest
from torch import Tensor, nn
from torchvision import models

from app.exactness import Outcome, Trial
from benchmarks.model_zoo import measure
from benchmarks.model_zoo.run import measured
from benchmarks.model_zoo.table import Row, append, read, summary
from benchmarks.model_zoo.zoo import GIANTS, Entry, all_entries

SMALL = Entry("benchmarks.exactness.models:Dropouts", 12, 2)


class OneLayer(nn.Sequential):
    """There is nothing to cut."""

    def __init__(self, classes: int) -> None:
        super().__init__(nn.Conv2d(3, classes, 1))


class Ends(nn.Conv2d):
    """Takes its process with it."""

    def __init__(self, classes: int) -> None:
        super().__init__(3, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        os._exit(7)


def test_a_model_with_dropout_and_skips_passes_in_2_and_in_4_stages() -> None:
    rows = list(measure.rows_of(SMALL))
    assert [(row.depth, row.status, len(row.cuts.split())) for row in rows] == [(2, "passed", 1), (4, "passed", 3)]
    assert rows[0].reached == "17 of 17"
    assert 0 <= rows[0].largest <= 1e-10


@pytest.mark.parametrize(
    ("kind", "name"), [("gradients", "head.weight"), ("state", "down1.1.running_mean"), ("losses", "")]
)
def test_what_differs_in_the_eighth_digit_is_inexact(monkeypatch: pytest.MonkeyPatch, kind: str, name: str) -> None:
    honest = measure._plain

    def falsified(trial: Trial) -> Outcome:
        outcome = honest(trial)
        if kind == "losses":
            return dataclasses.replace(outcome, losses=[loss * (1 + 1e-8) for loss in outcome.losses])
        getattr(outcome, kind)[name].mul_(1 + 1e-8)
        return outcome

    monkeypatch.setattr(measure, "_plain", falsified)
    for row in measure.rows_of(SMALL):
        assert row.status == "inexact"
        assert 5e-9 < row.largest < 2e-8
        assert not name or row.note.startswith(f"{name} 1.0e-08")


def test_a_gradient_that_does_not_come_is_inexact(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = measure._ranks

    def forgetful(*arguments: object) -> list[Outcome]:
        ranks = honest(*arguments)  # type: ignore[arg-type]
        for rank in ranks:
            rank.gradients.pop("head.bias", None)
        return ranks

    monkeypatch.setattr(measure, "_ranks", forgetful)
    assert [row.note.split(",")[0] for row in measure.rows_of(SMALL)] == ["head.bias 1.0e+00"] * 2


def test_a_model_that_cannot_be_cut_so_often_is_refused_with_the_reason() -> None:
    rows = list(measure.rows_of(Entry(f"{__name__}:OneLayer", 8, 1)))
    assert [row.status for row in rows] == ["refused", "refused"]
    assert "can be cut into 1 to" in rows[1].note


def test_a_process_that_ends_or_takes_too_long_is_a_row() -> None:
    ended = measured(Entry("tests.test_model_zoo:Ends", 8, 1), 60)
    assert [(row.depth, row.status) for row in ended] == [(2, "died"), (4, "died")]
    assert ended[0].note.startswith("exit code 7")
    late = measured(SMALL, 0.05)
    assert [row.note for row in late] == ["not done within 0.05 s"] * 2


def test_the_last_row_of_a_model_counts(tmp_path: Path) -> None:
    failed = Row("torchvision:a", 2, "failed", "float64", 64, 2, note="why, and how")
    passed = dataclasses.replace(failed, status="passed", loss=1e-13, parameters=7, peak_gib=0.5, note="")
    other = dataclasses.replace(failed, depth=4)
    for row in (failed, other, passed):
        append(tmp_path / "rows.csv", row)
    assert read(tmp_path / "rows.csv") == {("torchvision:a", 2): passed, ("torchvision:a", 4): other}


def test_the_summary_counts_a_model_only_when_it_passed_in_both() -> None:
    row = Row("torchvision:a", 2, "passed", "float64", 64, 2, gradients=2e-12)
    rows = [row, dataclasses.replace(row, depth=4), dataclasses.replace(row, model="torchvision:b")]
    rows.append(dataclasses.replace(rows[-1], depth=4, status="inexact", note="of x|y"))
    text = summary(rows, 3)
    assert "2 of 3 tried. 1 of 2 classifiers of torchvision exact (2 in 2 stages, 1 in 4 stages)" in text
    assert "float64 2.0e-12" in text
    assert "of x/y" in text


def test_the_table_has_every_classifier_once_and_the_giants_in_float32() -> None:
    entries = {entry.model: entry for entry in all_entries()}
    names = models.list_models(module=models)
    assert len(entries) == len(list(all_entries()))
    assert {name.partition(":")[2] for name in entries if name.startswith("torchvision:")} == set(names)
    sizes = {name: models.get_model_weights(name).DEFAULT.meta["num_params"] for name in names}
    assert {name for name, size in sizes.items() if size > 150e6} == set(GIANTS)
    assert {name for name in names if entries[f"torchvision:{name}"].dtype == "float32"} == set(GIANTS)
