"""Files of checkpoints: whole or not there, checked, and what is left of them by a full disk or a kill at any point."""

import errno
import os
import random
import stat
import time
from contextlib import nullcontext

import pytest
import torch

from app.checkpoint import file as checkpoint
from app.checkpoint.file import check_weights, keep_as, load_checkpoint, resume_state, save_checkpoint, write_file
from app.settings.cli import RunError
from models.weights import load_weights, read_weights
from tests.helpers import drilled_run
from tests.helpers.drilled_run import EVERY, HELD_AT
from tests.helpers.forked import running


@pytest.fixture
def last(tmp_path):
    return tmp_path / "checkpoints" / "last.pt"


@pytest.mark.parametrize("refusal", [None, errno.EPERM, errno.EMLINK])
def test_round_trip_and_second_name(refusal, last, monkeypatch):
    def link(*_):
        raise OSError(refusal, "no hard links here")

    if refusal:
        monkeypatch.setattr(os, "link", link)
    best = last.with_name("best.pt")
    save_checkpoint(last, {"step": 3, "w": torch.arange(4)})
    keep_as(last, best)
    save_checkpoint(last, {"step": 4, "w": torch.arange(4) + 1})
    assert load_checkpoint(best)["step"] == 3
    assert load_checkpoint(last)["w"].tolist() == [1, 2, 3, 4]
    assert sorted(p.name for p in last.parent.iterdir()) == ["best.pt", "last.pt"]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES])
def test_previous_checkpoint_survives_a_disk_that_takes_no_more(number, last, monkeypatch):
    save_checkpoint(last, {"step": 1})

    def refuse(_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", refuse)
    kept = rf"could not be written \({os.strerror(number)}\); the previous one .*; remove the cause, then --resume"
    with pytest.raises(RunError, match=kept):
        save_checkpoint(last, {"step": 2})
    assert load_checkpoint(last)["step"] == 1
    assert [p.name for p in last.parent.iterdir()] == ["last.pt"]


@pytest.mark.parametrize("refused", [stat.S_IFDIR, stat.S_IFREG])
def test_a_file_system_may_flush_files_alone(refused, last, monkeypatch):
    def fsync(descriptor):
        if stat.S_IFMT(os.fstat(descriptor).st_mode) == refused:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(RunError, match="could not be written") if refused == stat.S_IFREG else nullcontext():
        save_checkpoint(last, {"step": 1})
    assert last.exists() == (refused == stat.S_IFDIR)


def test_half_written_checkpoint_is_never_under_the_final_name(last, monkeypatch):
    save_checkpoint(last, {"step": 1})
    seen, fsync = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda descriptor: (seen.append(load_checkpoint(last)["step"]), fsync(descriptor)))
    save_checkpoint(last, {"step": 2})
    # Before the file's own flush the old one is in place; the folder is flushed after the rename.
    assert seen == [1, 2]


def test_no_flipped_bit_loads_silently(last):
    """106 of 150 flips in a checkpoint once did: ZIP's own checksums are not looked at by torch.load."""
    model = torch.nn.Linear(64, 8)
    save_checkpoint(last, {"step": 3, "model": model.state_dict()})
    data, draw = last.read_bytes(), random.Random(0)
    places = [draw.randrange(8 * len(data)) for _ in range(150)]
    for place in [*places, *range(8 * len(data) - 8 * 50, 8 * len(data), 7)]:
        flipped = bytearray(data)
        flipped[place // 8] ^= 1 << place % 8
        last.write_bytes(flipped)
        for load in (load_checkpoint, check_weights):
            with pytest.raises((RunError, ValueError), match=f"{last}.* is damaged"):
                load(last)
    last.write_bytes(data)
    check_weights(last)
    assert load_weights(model, read_weights(last)).left == ()


def test_missing_damaged_and_foreign_files_are_named(last, monkeypatch):
    def refused(match):
        with pytest.raises(RunError, match=match):
            load_checkpoint(last)

    refused("no checkpoint at")
    save_checkpoint(last, {"step": 3, "w": torch.arange(1000)})
    data = last.read_bytes()
    for length in (0, 10, len(data) // 2, len(data) - 51, len(data) - 50, len(data) - 1):
        last.write_bytes(data[:length])
        refused("damaged and was not loaded")
    last.write_bytes(b"not a checkpoint")
    refused("does not end with a checksum")
    write_file(last, lambda file: file.write(b"not a checkpoint"))
    refused("cannot be read")
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "FORMAT", 99)
        save_checkpoint(last, {})
    refused("has format 99")


@pytest.mark.parametrize("content", [[1, 2], "words", torch.zeros(3), None])
def test_a_checkpoint_that_holds_no_state_is_named(content, last):
    write_file(last, lambda file: torch.save(content, file))
    with pytest.raises(RunError, match=f"{last}.*no checkpoint|no checkpoint.*{last}"):
        load_checkpoint(last)
    with pytest.raises(RunError, match="start anew"):
        resume_state(last, last.with_name("best.pt"))


def test_a_damaged_last_names_the_checkpoint_that_is_left_and_is_not_replaced_by_it(last):
    best = last.with_name("best.pt")
    save_checkpoint(best, {"step": 3})
    save_checkpoint(last, {"step": 4})
    assert resume_state(last, best)["step"] == 4
    last.write_bytes(last.read_bytes()[:-60] + bytes(60))
    with pytest.raises(RunError, match=r"last.pt is damaged .*best.pt, of step 3, is whole: to go on from there, `cp "):
        resume_state(last, best)
    keep_as(last, best)
    with pytest.raises(RunError, match="No other checkpoint of the run is whole"):
        resume_state(last, best)


def test_weights_of_others_need_no_checksum(tmp_path):
    torch.save(torch.nn.Linear(3, 2).state_dict(), tmp_path / "new.pt")
    torch.save(torch.nn.Linear(3, 2).state_dict(), tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    (tmp_path / "empty.pt").write_bytes(b"")
    for name in ("new.pt", "old.pt", "empty.pt", "missing.pt"):
        check_weights(tmp_path / name)


def test_settings_and_classes_are_printable(last):
    """Terminal sequences in a checkpoint once reached the terminal through the names of its classes."""
    save_checkpoint(last, {"settings": {"model": "m\x1b[2J", "tile": 64}, "classes": ["a\x07", "b"]})
    state = load_checkpoint(last)
    assert (state["settings"], state["classes"]) == ({"model": "m\\x1b[2J", "tile": 64}, ["a\\x07", "b"])


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    return drilled_run.train(tmp_path_factory.mktemp("undisturbed"))["model"]


@pytest.mark.process
@pytest.mark.parametrize(
    ("place", "complete"), [("copying", HELD_AT - 1), ("writing", HELD_AT - 1), ("renamed", HELD_AT)]
)
def test_killed_run_leaves_the_last_complete_checkpoint_and_goes_on(place, complete, undisturbed, last):
    """Killed at every point of a checkpoint in two phases."""
    folder = last.parents[1]
    with running("tests.helpers.drilled_run", [str(folder), place], folder / "printed.txt") as process:
        deadline_s = time.monotonic() + 120
        while not (folder / "held").exists():
            assert process.is_running()
            assert time.monotonic() < deadline_s
            time.sleep(0.02)
        process.kill()
    assert load_checkpoint(last)["step"] == EVERY * complete
    assert last.with_suffix(".tmp").exists() == (place == "writing")
    found = drilled_run.train(folder)["model"]
    assert all(torch.equal(found[name], value) for name, value in undisturbed.items())
    assert load_checkpoint(last)["step"] == drilled_run.STEPS
    assert [file.name for file in last.parent.iterdir()] == ["last.pt"]
