"""``--parallel torch-1f1b`` as a user runs it: the run of one process, measured and checkpointed as any other."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.app.conftest import QUICK, Train, summary_of


@pytest.mark.process
def test_torchs_own_pipeline_trains_as_one_process(
    classify_slides: Path, train: Train, train_ranks: Train, tmp_path: Path
) -> None:
    common = ("--slides", classify_slides, *QUICK, "--optimizer", "sgd", "--steps", "3")
    for name, start, more in (
        ("torch-1f1b", train_ranks, ("--ranks", "2", "--twin-steps", "1")),
        ("single", train, ()),
    ):
        done = start(*common, "--parallel", name, *more, "--out", tmp_path / name)
        assert done.returncode == 0, done.stderr + done.stdout
    summary = summary_of(tmp_path / "torch-1f1b")
    assert summary["strategy"] == "torch-1f1b"
    assert (summary["ranks"], summary["stages"], summary["microbatches"]) == (2, 2, 2)
    assert (summary["steps"], summary["images"], summary["status"]) == (3, 12, "completed")
    assert summary["images_per_second_no_data"] > 0
    assert 0 < summary["bubble"] < 1
    for file in ("schedule.csv", "schedule.svg", "trace.json"):
        assert (tmp_path / "torch-1f1b" / file).stat().st_size > 0
    assert losses_of(tmp_path / "torch-1f1b") == pytest.approx(losses_of(tmp_path / "single"), rel=1e-4)
    assert summary["metrics"] == pytest.approx(summary_of(tmp_path / "single")["metrics"], rel=1e-3)
    ours, theirs = (checkpoint_of(tmp_path / name) for name in ("single", "torch-1f1b"))
    assert list(theirs["model"]) == list(ours["model"])
    assert theirs["stream"] == ours["stream"]
    assert theirs["optimizer"]["param_groups"] == ours["optimizer"]["param_groups"]
    for key, value in ours["model"].items():
        assert (theirs["model"][key] - value).abs().max() <= 1e-3 * max(1, value.abs().max()), key


def losses_of(run: Path) -> list[float]:
    with (run / "metrics.csv").open() as file:
        return [float(row["loss"]) for row in csv.DictReader(file) if row["loss"]]


def checkpoint_of(run: Path) -> dict[str, Any]:
    state: dict[str, Any] = torch.load(run / "checkpoints" / "last.pt", weights_only=True)
    return state
