"""A rank that is killed or fails ends the whole run soon, with one message, which the run folder keeps."""

from __future__ import annotations

import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.app.conftest import QUICK, ROOT, rank_process, summary_of, train_command, train_environment
from tests.helpers.ranks import MPI_ENVIRONMENT, MPIRUN


@pytest.mark.process
def test_killed_rank_ends_the_run_with_one_message(classify_slides: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    strategy = ("--ranks", "2", "--parallel", "ddp")
    arguments = ("--slides", classify_slides, *QUICK, "--out", out, *strategy, "--checkpoint-every", "2")
    process = subprocess.Popen(
        train_command(*arguments, "--steps", "100000"),
        cwd=ROOT,
        env=train_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    deadline_s = time.monotonic() + 90
    while not (out / "checkpoints" / "last.pt").exists():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    rank_process(process, 1).send_signal(signal.SIGKILL)
    printed, _ = process.communicate(timeout=60)
    assert process.returncode == 1, printed
    message = (out / "fault.txt").read_text()
    assert message.startswith("rank 1 was killed (signal 9) at step ")
    assert printed.count("was killed (signal 9)") == 1
    assert "Traceback" not in printed
    assert printed.splitlines()[-1].endswith(f"exit code 137; its message stands above and in {out}/fault.txt")
    summary = summary_of(out)
    assert (summary["status"], summary["error"] + "\n") == ("failed", message)


@pytest.mark.process
@pytest.mark.parametrize("launcher", [(), (str(MPIRUN), "-n", "2")], ids=["gloo", "mpi"])
@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("killed", r"(was killed \(signal 9\)|died)"),  # mpirun may take the exit code before it is seen
        ("shape", r"failed \(RuntimeError: (addmm: )?mat1 and mat2 shapes cannot be multiplied \(1x7 and 8x2\)\)"),
    ],
    ids=["killed", "shape"],
)
def test_failing_rank_is_named_with_action_and_shapes(
    fault: str, reason: str, launcher: tuple[str, ...], classify_slides: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    split = ("--parallel", "1f1b", "--cuts=3", "--batch", "2")
    split += ("--model", "tests.helpers.failing_model:failing")
    arguments = ("--slides", classify_slides, *QUICK, *split, "--out", out, "--steps", "100000")
    done = subprocess.run(
        [*launcher, *train_command(*arguments, *(() if launcher else ("--ranks", "2")))],
        cwd=ROOT,
        env={**train_environment(), **MPI_ENVIRONMENT, "FAULT": fault},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=200,
    )
    assert done.returncode not in (0, 2), done.stdout
    messages = re.findall(r"error: (rank \d .*)", done.stdout)
    assert len(messages) == 1, done.stdout
    where = r" at step 2 in 1F1: forward pass of microbatch 1 through stage 1, inputs \w+ \(1, 8, 63, 63\) float32"
    assert re.fullmatch(rf"rank 1 {reason}{where}", messages[0]), messages[0]
    assert ">>1F1<<" in done.stdout
    assert (out / "fault.txt").read_text().splitlines()[0] == messages[0]
    # Found dead or heard of, not waited for: watchdogs end what lingers after 20 s.
    assert time.time() - (out / "fault.txt").stat().st_mtime < 15
