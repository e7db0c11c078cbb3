"""A rank that is killed ends the whole run soon, with one message, which the run folder keeps."""

from __future__ import annotations

import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from tests.app.conftest import QUICK, ROOT, summary_of, train_command, train_environment


@pytest.mark.slow
def test_killed_rank_ends_the_run_with_one_message(classify_slides: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    arguments = ("--slides", classify_slides, *QUICK, "--out", out, "--ranks", "2", "--checkpoint-every", "2")
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
    ranks = [child for child in psutil.Process(process.pid).children() if "app.train" in child.cmdline()]
    second = next(rank for rank in ranks if rank.environ().get("RANK") == "1")
    second.send_signal(signal.SIGKILL)
    printed, _ = process.communicate(timeout=60)
    assert process.returncode == 1, printed
    message = (out / "fault.txt").read_text()
    assert message.startswith("rank 1 was killed (signal 9) at step ")
    assert printed.count("was killed (signal 9)") == 1
    assert "Traceback" not in printed
    assert printed.splitlines()[-1].endswith(f"exit code 137; its message stands above and in {out}/fault.txt")
    summary = summary_of(out)
    assert (summary["status"], summary["error"] + "\n") == ("failed", message)
