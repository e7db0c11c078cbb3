from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from app.settings.cli import RunError
from app.settings.run import DataSettings, ModelSettings, RunConfig, StrategySettings
from app.training.run_folder import CsvLog, RunFolder

CONFIG = RunConfig(DataSettings(Path("slides")))


def started(path: Path) -> RunFolder:
    folder = RunFolder(path)
    folder.open(CONFIG)
    folder.last.parent.mkdir()
    folder.last.write_bytes(b"checkpoint")
    return folder


def test_a_run_is_not_overwritten(tmp_path: Path) -> None:
    folder = started(tmp_path / "run")
    with pytest.raises(ValueError, match="continue it with --resume, or name another --out"):
        folder.open(CONFIG)
    folder.open(replace(CONFIG, resume=True))


def test_resuming_with_other_settings_names_each_that_differs(tmp_path: Path) -> None:
    folder = started(tmp_path / "run")
    other = replace(CONFIG, resume=True, seed=3, net=ModelSettings(model="unet"))
    with pytest.raises(ValueError, match="model: the run has 'resnet50', asked is 'unet'") as caught:
        folder.open(other)
    assert "seed: the run has 0, asked is 3" in str(caught.value)


def test_length_and_ranks_may_change_on_resume(tmp_path: Path) -> None:
    folder = started(tmp_path / "run")
    folder.open(replace(CONFIG, resume=True, steps=5, strategy=StrategySettings(ranks=2, microbatches=None)))
    folder.open(replace(CONFIG, resume=True, strategy=StrategySettings("spatial", ranks=2, grid="2x1")))


def test_a_folder_that_cannot_be_made_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match=r"cannot be written .*name another with --out"):
        RunFolder(tmp_path / "file" / "run").open(CONFIG)


def test_json_is_whole_or_not_there(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.write_json("summary.json", {"steps": 1})
    with pytest.raises(ValueError, match="Out of range float"):
        folder.write_json("summary.json", {"loss": float("nan")})
    assert json.loads(folder.summary.read_text()) == {"steps": 1}


def test_csv_log_is_cut_back_to_a_checkpoint_and_continued(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    log = CsvLog(path, ("step", "loss"))
    for step in range(1, 5):
        log.add({"step": step, "loss": None if step == 2 else step / 10})
    with path.open("a") as file:
        file.write("5")  # a crash in the middle of a row
    log = CsvLog(path, ("step", "loss"))
    log.cut_after(2)
    log.add({"step": 3, "loss": 0.5})
    assert path.read_text().split() == ["step,loss", "1,0.1", "2,", "3,0.5"]
