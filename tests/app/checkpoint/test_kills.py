"""A run killed at every point of a checkpoint in two phases: the last complete one loads, and the run goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

from app.checkpoint.file import load_checkpoint
from tests.app.conftest import ROOT
from tests.helpers import drilled_run
from tests.helpers.drilled_run import EVERY, HELD_AT

pytestmark = pytest.mark.process

PLACES = {"copying": HELD_AT - 1, "writing": HELD_AT - 1, "renamed": HELD_AT}
"""Where a run is killed -> how many checkpoints are complete then."""


@pytest.fixture(scope="module")
def held(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, tuple[Path, subprocess.Popen[bytes]]]]:
    """Runs held up in their second checkpoint, each elsewhere; they start side by side."""
    runs = {}
    for place in PLACES:
        folder = tmp_path_factory.mktemp(place)
        command = [sys.executable, "-m", "tests.helpers.drilled_run", str(folder), place]
        runs[place] = folder, subprocess.Popen(command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"})
    yield runs
    for _, process in runs.values():
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    model: dict[str, torch.Tensor] = drilled_run.train(tmp_path_factory.mktemp("undisturbed"))["model"]
    return model


@pytest.mark.parametrize("place", PLACES)
def test_killed_run_leaves_the_last_complete_checkpoint_and_goes_on(
    place: str, held: dict[str, tuple[Path, subprocess.Popen[bytes]]], undisturbed: dict[str, torch.Tensor]
) -> None:
    folder, process = held[place]
    deadline_s = time.monotonic() + 120
    while not (folder / "held").exists():
        assert process.poll() is None
        assert time.monotonic() < deadline_s
        time.sleep(0.02)
    (writer,) = psutil.Process(process.pid).children()
    process.kill()
    process.wait()
    assert process.returncode == -signal.SIGKILL
    # Nobody is left who might rename what a resumed run is writing.
    assert not psutil.wait_procs([writer], timeout=30)[1]
    last = folder / "checkpoints" / "last.pt"
    assert load_checkpoint(last)["step"] == EVERY * PLACES[place]
    assert last.with_suffix(".tmp").exists() == (place == "writing")
    found = drilled_run.train(folder)["model"]
    assert all(torch.equal(found[name], value) for name, value in undisturbed.items())
    assert load_checkpoint(last)["step"] == drilled_run.STEPS
    assert [file.name for file in last.parent.iterdir()] == ["last.pt"]
