from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from app.checkpoint import file as checkpoint
from app.checkpoint.file import check_weights, keep_as, load_checkpoint, resume_state, save_checkpoint, write_file
from app.settings.cli import RunError
from models.weights import load_weights, read_weights


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
from app.checkpoint.file import save_checkpoint
from app.settings.cli import RunError
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


@pytest.mark.process
def test_previous_checkpoint_survives_a_disk_that_takes_no_more(tmp_path: Path) -> None:
    path = tmp_path / "last.pt"
    done = subprocess.run([sys.executable, "-c", FULL_DISK, str(path)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1, done.stderr
    assert "could not be written (File too large); the previous one is kept" in done.stdout
    assert load_checkpoint(path)["step"] == 1
    assert [p.name for p in tmp_path.iterdir()] == ["last.pt"]


def test_missing_damaged_and_foreign_files_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "last.pt"
    with pytest.raises(RunError, match="no checkpoint at"):
        load_checkpoint(path)
    path.write_bytes(b"not a checkpoint")
    with pytest.raises(RunError, match="does not end with a checksum"):
        load_checkpoint(path)
    write_file(path, lambda file: file.write(b"not a checkpoint"))
    with pytest.raises(RunError, match="cannot be read"):
        load_checkpoint(path)
    monkeypatch.setattr(checkpoint, "FORMAT", 99)
    save_checkpoint(path, {})
    monkeypatch.undo()
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


def test_no_flipped_bit_loads_silently(tmp_path: Path) -> None:
    """106 of 150 flips in a checkpoint once did: ZIP's own checksums are not looked at by torch.load."""
    path, model = tmp_path / "last.pt", torch.nn.Linear(64, 8)
    save_checkpoint(path, {"step": 3, "model": model.state_dict()})
    data, draw = path.read_bytes(), random.Random(0)
    places = [draw.randrange(8 * len(data)) for _ in range(150)]
    for place in [*places, *range(8 * len(data) - 8 * 50, 8 * len(data), 7)]:
        flipped = bytearray(data)
        flipped[place // 8] ^= 1 << place % 8
        path.write_bytes(flipped)
        for load in (load_checkpoint, check_weights):
            with pytest.raises((RunError, ValueError), match=f"{path}.* is damaged"):
                load(path)
    path.write_bytes(data)
    check_weights(path)
    assert load_weights(model, read_weights(path)).left == ()


def test_a_cut_checkpoint_is_damaged(tmp_path: Path) -> None:
    path = tmp_path / "last.pt"
    save_checkpoint(path, {"step": 3, "w": torch.arange(1000)})
    data = path.read_bytes()
    for length in (0, 10, len(data) // 2, len(data) - 51, len(data) - 50, len(data) - 1):
        path.write_bytes(data[:length])
        with pytest.raises(RunError, match="damaged and was not loaded"):
            load_checkpoint(path)


def test_a_damaged_last_names_the_checkpoint_that_is_left_and_is_not_replaced_by_it(tmp_path: Path) -> None:
    last, best = tmp_path / "last.pt", tmp_path / "best.pt"
    save_checkpoint(best, {"step": 3})
    save_checkpoint(last, {"step": 4})
    assert resume_state(last, best)["step"] == 4
    last.write_bytes(last.read_bytes()[:-60] + bytes(60))
    with pytest.raises(RunError, match=r"last.pt is damaged .*best.pt, of step 3, is whole: to go on from there, `cp "):
        resume_state(last, best)
    keep_as(last, best)
    with pytest.raises(RunError, match="No other checkpoint of the run is whole"):
        resume_state(last, best)


def test_weights_of_others_need_no_checksum(tmp_path: Path) -> None:
    torch.save(torch.nn.Linear(3, 2).state_dict(), tmp_path / "new.pt")
    torch.save(torch.nn.Linear(3, 2).state_dict(), tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    (tmp_path / "empty.pt").write_bytes(b"")
    for name in ("new.pt", "old.pt", "empty.pt", "missing.pt"):
        check_weights(tmp_path / name)


@pytest.mark.parametrize("content", [[1, 2], "words", torch.zeros(3), None])
def test_a_checkpoint_that_holds_no_state_is_named(content: object, tmp_path: Path) -> None:
    path = tmp_path / "last.pt"
    write_file(path, lambda file: torch.save(content, file))
    with pytest.raises(RunError, match="no checkpoint") as fault:
        load_checkpoint(path)
    assert str(path) in str(fault.value)
    with pytest.raises(RunError, match="start anew"):
        resume_state(path, tmp_path / "best.pt")


def test_settings_and_classes_are_printable(tmp_path: Path) -> None:
    """Terminal sequences in a checkpoint once reached the terminal through the names of its classes."""
    evil = {"settings": {"model": "m\x1b[2J", "tile": 64}, "classes": ["a\x07", "b"], "w": torch.ones(1)}
    save_checkpoint(tmp_path / "c.pt", evil)
    state = load_checkpoint(tmp_path / "c.pt")
    assert state["settings"] == {"model": "m\\x1b[2J", "tile": 64}
    assert state["classes"] == ["a\\x07", "b"]
