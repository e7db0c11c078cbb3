"""Training with the model split over ranks, as a user starts it: processes of their own, and what is refused first."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.train import main
from tests.app.conftest import QUICK, Train, summary_of


@pytest.mark.process
def test_processes_train_split_and_go_on_sharded_and_in_slices(
    classify_slides: Path, train_process: Train, train_ranks: Train, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    # Without --microbatches: those of the first strategy are kept, which are not the second one's own.
    arguments = [argument for argument in QUICK if argument not in ("--microbatches", "2")]
    common = ("--slides", classify_slides, *arguments, "--optimizer", "sgd", "--out", out, "--ranks", "2")
    done = train_process(*common, "--parallel", "master", "--steps", "3", "--twin-steps=1")
    assert done.returncode == 0, done.stderr + done.stdout
    summary = summary_of(out)
    assert (summary["strategy"], summary["ranks"], summary["stages"], summary["microbatches"]) == ("master", 2, 2, 4)
    assert 0 < summary["bubble"] < 1
    assert (summary["images"], len(summary["peak_memory_bytes"])) == (12, 2)
    done = train_ranks(*common, "--parallel", "fsdp", "--steps", "5", "--resume", "--extend")
    assert done.returncode == 0, done.stderr + done.stdout
    summary = summary_of(out)
    assert (summary["strategy"], summary["stages"], summary["microbatches"], summary["images"]) == ("fsdp", 1, 4, 20)
    assert summary["bubble"] is None
    done = train_ranks(*common, "--parallel", "ddp", "--zero", "2", "--steps", "6", "--resume", "--extend")
    assert done.returncode == 0, done.stderr + done.stdout
    summary = summary_of(out)
    assert (summary["strategy"], summary["microbatches"], summary["images"]) == ("ddp", 4, 24)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--parallel", "gpipe"), "--parallel gpipe splits the model over 2 ranks or more; got --ranks 1"),
        (("--parallel", "mast", "--ranks", "2", "--microbatches", "4"), "mast computes 2 microbatches per group"),
        (
            ("--norm-statistics=deferred", "--norm", "group"),
            "--norm-statistics deferred is about --norm batch",
        ),
    ],
)
def test_wrong_usage_is_said_before_anything_is_read(
    arguments: tuple[str, ...], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--slides", str(tmp_path), "--out", str(tmp_path / "run"), *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
