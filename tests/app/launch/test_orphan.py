"""Ranks whose launcher is killed."""

from __future__ import annotations

import subprocess
from pathlib import Path

import psutil
import pytest
import torch

from tests.app.conftest import QUICK, ROOT, summary_of, train_command, train_environment
from tests.app.test_train import wait_for


@pytest.mark.process
def test_ranks_stop_and_save_when_their_launcher_is_killed(classify_slides: Path, tmp_path: Path) -> None:
    out, temporary = tmp_path / "run", tmp_path / "tmp"
    temporary.mkdir()
    arguments = ("--slides", classify_slides, *QUICK, "--ranks", "2", "--parallel", "ddp", "--validation", "0")
    launcher = subprocess.Popen(
        train_command(*arguments, "--checkpoint-every", "2", "--steps", "100000", "--out", out),
        cwd=ROOT,
        env={**train_environment(), "TMPDIR": str(temporary)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    wait_for(out / "checkpoints" / "last.pt", launcher)
    started = psutil.Process(launcher.pid).children(recursive=True)
    assert len(started) >= 2
    assert list(temporary.glob("megatile-ranks-*"))
    launcher.kill()  # and not waited for: nobody may take its exit status before the ranks look
    _, alive = psutil.wait_procs(started, timeout=40)
    for process in alive:
        process.kill()
    launcher.wait()
    assert not alive
    assert not list(temporary.glob("megatile-ranks-*"))
    summary = summary_of(out)
    assert summary["status"] == "interrupted"
    assert torch.load(out / "checkpoints" / "last.pt", weights_only=True)["step"] == summary["steps"]
