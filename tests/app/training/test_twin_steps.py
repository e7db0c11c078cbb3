"""Steps measured from memory after a run: only where they are asked for, and no fault in them makes the run fail."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any

import pytest

from app.settings.run import DataSettings, RunConfig
from app.training.loop import TrainingLoop
from parallel.engine.step import NonFiniteLoss
from tests.app.conftest import QUICK, Train, summary_of
from tests.app.test_train import equal, model_of
from tests.helpers.forked import run_ranks

STEPS = 2
TWIN = ("--steps", str(STEPS), "--twin-steps=1")


def fails_after_the_run(patch: pytest.MonkeyPatch) -> None:
    compute = TrainingLoop._step

    def step(loop: TrainingLoop, batch: Any, number: int) -> Any:
        if number >= STEPS:
            raise NonFiniteLoss((0,), (float("nan"),))
        return compute(loop, batch, number)

    patch.setattr(TrainingLoop, "_step", step)


def test_there_are_none_by_default() -> None:
    assert RunConfig(DataSettings(Path("slides"))).twin_steps == 0


def test_a_fault_in_them_leaves_a_completed_run(
    classify_slides: Path, train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    common = ("--slides", classify_slides, *QUICK)
    done = train(*common, *TWIN, "--out", tmp_path / "good")
    assert (done.returncode, "fed from memory: " in done.stdout) == (0, True), done.stderr
    assert summary_of(tmp_path / "good")["images_per_second_no_data"] > 0
    fails_after_the_run(monkeypatch)
    done = train(*common, *TWIN, "--out", tmp_path / "bad")
    assert done.returncode == 0, done.stderr
    assert "warning: --twin-steps: these steps failed" in done.stderr
    summary = summary_of(tmp_path / "bad")
    assert (summary["status"], summary["error"], summary["images_per_second_no_data"]) == ("completed", None, None)
    assert equal(model_of(tmp_path / "bad"), model_of(tmp_path / "good"))
    assert (tmp_path / "bad" / "report.html").exists()


def train_with_a_fault_on_rank_1(*words: str) -> int:
    with pytest.MonkeyPatch.context() as patch:
        if os.environ["RANK"] == "1":
            fails_after_the_run(patch)
        code: int = importlib.import_module("app.train").main(list(words))
        return code


@pytest.mark.process
def test_a_fault_of_one_rank_leaves_a_completed_run(classify_slides: Path, tmp_path: Path) -> None:
    words = ("--slides", str(classify_slides), *QUICK, *TWIN, "--parallel", "ddp", "--out", str(tmp_path / "run"))
    codes, printed = run_ranks(2, f"{__name__}:train_with_a_fault_on_rank_1", words, tmp_path)
    assert codes == [0, 0], printed
    assert summary_of(tmp_path / "run")["status"] == "completed"
