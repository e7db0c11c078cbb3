from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from app.checkpoint import keep_as, load_checkpoint, save_checkpoint
from app.cli import RunError


def test_round_trip_and_second_name(tmp_path: Path) -> None:
    last, best = tmp_path / "checkpoints" / "last.pt", tmp_path / "checkpoints" / "best.pt"
    save_checkpoint(last, {"step": 3, "w": torch.arange(4)})
    keep_as(last, best)
    save_checkpoint(last, {"step": 4, "w": torch.arange(4) + 1})
    assert load_checkpoint(best)["step"] == 3
    assert load_checkpoint(last)["w"].tolist() == [1, 2, 3, 4]
    assert sorted(p.name for p in last.parent.iterdir()) == ["best.pt", "last.pt"]


FULL_DISK = """
import resource, signal, sys, torch
from pathlib import Path
from app.checkpoint import save_checkpoint
from app.cli import RunError
path = Path(sys.argv[1])
save_checkpoint(path, {"step": 1})
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    save_checkpoint(path, {"step": 2, "w": torch.zeros(1_000_000)})
except RunError as fault:
    print(fault)
    sys.exit(1)
"""


def test_previous_checkpoint_survives_a_disk_that_takes_no_more(tmp_path: Path) -> None:
    path = tmp_path / "last.pt"
    done = subprocess.run([sys.executable, "-c", FULL_DISK, str(path)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1, done.stderr
    assert "could not be written (File too large); the previous one is kept" in done.stdout
    assert load_checkpoint(path)["step"] == 1
    assert [p.name for p in tmp_path.iterdir()] == ["last.pt"]


def test_missing_damaged_and_foreign_files_are_named(tmp_path: Path) -> None:
    path = tmp_path / "last.pt"
    with pytest.raises(RunError, match="no checkpoint at"):
        load_checkpoint(path)
    path.write_bytes(b"not a checkpoint")
    with pytest.raises(RunError, match="cannot be read"):
        load_checkpoint(path)
    torch.save({"format": 99}, path)
    with pytest.raises(RunError, match="has format 99"):
        load_checkpoint(path)


def test_half_written_checkpoint_is_never_under_the_final_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "last.pt"
    save_checkpoint(path, {"step": 1})
    seen: list[int] = []
    fsync = os.fsync

    def look(descriptor: int) -> None:
        seen.append(load_checkpoint(path)["step"])
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", look)
    save_checkpoint(path, {"step": 2})
    # Before the file's own flush the old one is in place; the folder is flushed after the rename.
    assert seen == [1, 2]
