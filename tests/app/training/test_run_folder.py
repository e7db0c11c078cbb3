from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from app.settings.cli import RunError
from app.settings.fields import with_values
from app.settings.run import DataSettings, ModelSettings, RunConfig
from app.training.run_folder import CsvLog, RunFolder

CONFIG = RunConfig(DataSettings(Path("slides")))


RESUMED = replace(CONFIG, resume=True)


def started(path: Path, config: RunConfig = CONFIG) -> RunFolder:
    folder = RunFolder(path)
    folder.open(config)
    folder.last.parent.mkdir()
    folder.last.write_bytes(b"checkpoint")
    return folder


def test_a_run_is_not_overwritten(tmp_path: Path) -> None:
    folder = started(tmp_path / "run")
    with pytest.raises(ValueError, match="continue it with --resume, or name another --out"):
        folder.open(CONFIG)
    folder.open(RESUMED)


def test_resuming_with_other_settings_names_each_that_differs(tmp_path: Path) -> None:
    folder = started(tmp_path / "run")
    other = replace(CONFIG, resume=True, seed=3, net=ModelSettings(model="unet"))
    with pytest.raises(ValueError, match="model: the run has 'resnet50', asked is 'unet'") as caught:
        folder.open(other)
    assert "seed: the run has 0, asked is 3" in str(caught.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"parallel": "ddp", "ranks": 2, "shares": "auto", "gradient_buckets": "4MiB"},
        {"parallel": "spatial", "ranks": 2, "grid": "2x1"},
        {"parallel": "gpipe", "ranks": 2, "stages": 2, "cuts": "layer2", "compile": True},
        {"stream": "512", "offload_host": "1GiB"},
        {"recompute": "optimal", "recompute_runs": "conv1:add"},
        {"offload": "overlap", "offload_ahead": "1MiB", "offload_state": "optimizer"},
        {"device": "mixed", "parallel": "ddp", "ranks": 2, "cpu_ranks": 1, "mixed_sums": "host"},
        {"channels_last": False, "memory": "16GiB"},
        {"precision": "bf16"},
        {"microbatches": 2},
        {"patience": 3, "validate_every": 5, "checkpoint_every": 7, "twin_steps": 1, "read_threads": 2},
    ],
    ids=lambda changes: "-".join(changes),
)
def test_where_and_how_a_run_computes_may_change(changes: dict[str, Any], tmp_path: Path) -> None:
    folder = started(tmp_path / "run")
    folder.open(with_values(RESUMED, changes))
    assert folder.settings().items() >= changes.items()


@pytest.mark.parametrize(
    "changes",
    [
        *({"batch": 4}, {"seed": 1}, {"norm": "group"}, {"norm_statistics": "deferred"}, {"lr": 1.0}, {"warmup": 5}),
        *({"decay_all": True}, {"weight_decay": 0.1}, {"ema": 0.9}, {"validation": 0.3}, {"class_weights": "balanced"}),
        *({"sample": "class"}, {"tile": 256}, {"steps": 5}, {"epochs": 11.0}, {"epochs": 1.0}),
    ],
    ids=str,
)
def test_what_a_run_computes_may_not(changes: dict[str, Any], tmp_path: Path) -> None:
    folder = started(tmp_path / "run")
    before = folder.config.read_bytes()
    with pytest.raises(ValueError, match=next(iter(changes))):
        folder.open(with_values(RESUMED, changes))
    assert folder.config.read_bytes() == before


def test_a_run_gets_longer_only_with_extend(tmp_path: Path) -> None:
    folder = started(tmp_path / "run", replace(CONFIG, steps=10))
    folder.open(replace(RESUMED, steps=10))
    with pytest.raises(ValueError, match=r"ends after 10 steps, asked is 20 steps.*--extend"):
        folder.open(replace(RESUMED, steps=20))
    folder.open(replace(RESUMED, steps=20, extend=True))
    folder.open(replace(RESUMED, steps=20))  # the length of the run from now on
    with pytest.raises(ValueError, match="longer, not shorter"):
        folder.open(replace(RESUMED, steps=10, extend=True))
    folder.open(replace(RESUMED, epochs=3.0, extend=True))
    assert any("--resume" in fault for fault in replace(CONFIG, extend=True).validate())


def test_ten_epochs_are_the_default(tmp_path: Path) -> None:
    folder = started(tmp_path / "run")
    folder.open(replace(RESUMED, epochs=10.0))


def test_a_run_from_before_a_setting_existed_has_its_default(tmp_path: Path) -> None:
    """Only of weight decay it is another value that such a run computed with."""
    folder = started(tmp_path / "run")
    old = yaml.safe_load(folder.config.read_text())
    for key in ("decay_all", "focal_gamma"):
        del old[key]
    del old["layer_decay"]
    folder.config.write_text(yaml.safe_dump(old))
    with pytest.raises(ValueError, match="decay_all: the run has True, asked is False"):
        folder.open(RESUMED)
    folder.open(with_values(RESUMED, {"decay_all": True}))


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
