"""A run killed at every point of a checkpoint in two phases: the last complete one loads, and the run goes on."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from app.checkpoint.file import load_checkpoint
from tests.helpers import drilled_run
from tests.helpers.drilled_run import EVERY, HELD_AT
from tests.helpers.forked import running

pytestmark = pytest.mark.process

PLACES = {"copying": HELD_AT - 1, "writing": HELD_AT - 1, "renamed": HELD_AT}
"""Where a run is killed -> how many checkpoints are complete then."""


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    model: dict[str, torch.Tensor] = drilled_run.train(tmp_path_factory.mktemp("undisturbed"))["model"]
    return model


@pytest.mark.parametrize("place", PLACES)
def test_killed_run_leaves_the_last_complete_checkpoint_and_goes_on(
    place: str, undisturbed: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    words = [str(folder), place]
    with running("tests.helpers.drilled_run", words, tmp_path / "printed.txt") as process:
        deadline_s = time.monotonic() + 120
        while not (folder / "held").exists():
            assert process.is_running()
            assert time.monotonic() < deadline_s
            time.sleep(0.02)
        process.kill()
    last = folder / "checkpoints" / "last.pt"
    assert load_checkpoint(last)["step"] == EVERY * PLACES[place]
    assert last.with_suffix(".tmp").exists() == (place == "writing")
    found = drilled_run.train(folder)["model"]
    assert all(torch.equal(found[name], value) for name, value in undisturbed.items())
    assert load_checkpoint(last)["step"] == drilled_run.STEPS
    assert [file.name for file in last.parent.iterdir()] == ["last.pt"]
