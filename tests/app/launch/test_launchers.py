"""The same run under torchrun over Gloo and under mpirun over MPI: equal losses in every digit that is written.

They are those of one process, too.
"""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

import pytest

from tests.app.conftest import QUICK, ROOT, Train, summary_of, train_command, train_environment
from tests.helpers.ranks import MPI_ENVIRONMENT, MPIRUN

TORCHRUN = str(Path(sys.executable).with_name("torchrun"))


@pytest.mark.process
def test_losses_are_equal_under_torchrun_and_mpirun(classify_slides: Path, train: Train, tmp_path: Path) -> None:
    shared = ("--slides", classify_slides, *QUICK, "--optimizer", "sgd", "--steps", "4")
    settings = (*shared, "--parallel", "bidirectional")
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
        losses.append(losses_of(tmp_path / name))
    assert len(set(losses[0])) == 4
    assert losses[0] == losses[1]
    done = train(*shared, "--parallel", "single", "--out", tmp_path / "one")
    assert done.returncode == 0, done.stderr
    one = [float(loss) for loss in losses_of(tmp_path / "one")]
    assert [float(loss) for loss in losses[0]] == pytest.approx(one, rel=1e-4)


def losses_of(run: Path) -> list[str]:
    with (run / "metrics.csv").open() as file:
        return [row["loss"] for row in csv.DictReader(file)]
