"""The same run under torchrun over Gloo and under mpirun over MPI: equal losses, in every digit that is written."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

import pytest

from tests.app.conftest import QUICK, ROOT, summary_of, train_command, train_environment
from tests.helpers.ranks import MPI_ENVIRONMENT, MPIRUN

TORCHRUN = str(Path(sys.executable).with_name("torchrun"))


@pytest.mark.process
def test_losses_are_equal_under_torchrun_and_mpirun(classify_slides: Path, tmp_path: Path) -> None:
    settings = (
        "--slides",
        classify_slides,
        *QUICK,
        "--optimizer",
        "sgd",
        "--parallel",
        "bidirectional",
        "--steps",
        "4",
    )
    losses = []
    for name, start in (("torchrun", [TORCHRUN, "--nproc-per-node", "2"]), ("mpirun", [str(MPIRUN), "-n", "2"])):
        python, *module = train_command(*settings, "--out", tmp_path / name)
        done = subprocess.run(
            [*start, *([] if name == "torchrun" else [python]), *module],
            cwd=ROOT,
            env={**train_environment(), **MPI_ENVIRONMENT},
            capture_output=True,
            text=True,
            timeout=140,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert "\x1b" not in done.stdout
        assert (summary_of(tmp_path / name)["ranks"], summary_of(tmp_path / name)["steps"]) == (2, 4)
        with (tmp_path / name / "metrics.csv").open() as file:
            losses.append([row["loss"] for row in csv.DictReader(file)])
    assert len(set(losses[0])) == 4
    assert losses[0] == losses[1]
