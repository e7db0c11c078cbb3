"""The launcher's promises: exit codes come through, signals reach the ranks, one failing rank ends the others."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.process

START = """
import sys
from parallel.comm.torch_launch import launch_ranks

sys.exit(launch_ranks(2, [sys.executable, *sys.argv[1:]]))
"""

RANK = """
import os, pathlib, signal, sys, time
folder, code = pathlib.Path(sys.argv[1]), int(sys.argv[2])
got = []
for number in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, lambda n, _: got.append(n))
(folder / os.environ["RANK"]).write_text(str(os.getpid()))
if code and os.environ["RANK"] == "1":
    sys.exit(code)
end = time.monotonic() + 60
while not got and time.monotonic() < end:
    time.sleep(0.05)
(folder / ("signal" + os.environ["RANK"])).write_text(str(got[0] if got else "none"))
"""


def start(folder: Path, code: int) -> subprocess.Popen[str]:
    script = folder / "rank.py"
    script.write_text(RANK)
    (folder / "tmp").mkdir()
    command = [sys.executable, "-c", START, str(script), str(folder), str(code)]
    return subprocess.Popen(command, env={**os.environ, "TMPDIR": str(folder / "tmp")}, text=True)


def test_exit_code_of_a_failing_rank_comes_through_and_ends_the_other(tmp_path: Path) -> None:
    process = start(tmp_path, 7)
    assert process.wait(timeout=60) == 7
    assert (tmp_path / "signal0").read_text() == str(int(signal.SIGTERM))
    assert list((tmp_path / "tmp").iterdir()) == []


def test_signal_is_handed_to_every_rank_and_the_run_ends_well(tmp_path: Path) -> None:
    process = start(tmp_path, 0)
    deadline = time.monotonic() + 60
    while not all((tmp_path / rank).exists() for rank in "01"):
        assert time.monotonic() < deadline, "ranks did not start"
        time.sleep(0.05)
    process.send_signal(signal.SIGUSR1)
    assert process.wait(timeout=60) == 0
    assert [(tmp_path / f"signal{rank}").read_text() for rank in "01"] == [str(int(signal.SIGUSR1))] * 2


RESTARTS = START.replace("launch_ranks(2, [sys.executable, *sys.argv[1:]])", "launch_ranks(1, sys.argv[1:], 2)")

ATTEMPT = """
import pathlib, signal, sys, time
folder, failures = pathlib.Path(sys.argv[1]), int(sys.argv[2])
signal.signal(signal.SIGUSR1, lambda *_: sys.exit(9))
attempt = len(list(folder.glob("attempt[0-9]"))) + 1
(folder / f"attempt{attempt}").touch()
if attempt > failures:
    sys.exit(0)
time.sleep(60 if attempt == 2 and failures == 9 else 0)
sys.exit(10 + attempt)
"""
"""A rank that fails so often; with 9, the second attempt is there to be asked to stop."""


def restarting(folder: Path, failures: int) -> subprocess.Popen[str]:
    script = folder / "attempt.py"
    script.write_text(ATTEMPT)
    command = [sys.executable, "-c", RESTARTS, sys.executable, str(script), str(folder), str(failures)]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


def test_ranks_that_fail_are_started_again_as_often_as_asked(tmp_path: Path) -> None:
    for failures, code in ((1, 0), (5, 13)):
        folder = tmp_path / str(failures)
        folder.mkdir()
        process = restarting(folder, failures)
        _, printed = process.communicate(timeout=60)
        assert process.returncode == code, printed
        assert len(list(folder.glob("attempt[0-9]"))) == min(failures + 1, 3)
        assert "a rank ended with exit code 11: restart 1 of 2" in printed


FEWER = START.replace("[sys.executable, *sys.argv[1:]])", "sys.argv[1:], 2, lambda ranks: ranks - 1)").replace(
    "launch_ranks(2", "launch_ranks(3"
)


def test_ranks_that_fail_may_be_started_again_as_fewer(tmp_path: Path) -> None:
    fails = "import os, pathlib, sys; world = os.environ['WORLD_SIZE']; "
    fails += f"pathlib.Path({str(tmp_path)!r}, world + os.environ['RANK']).touch(); sys.exit(int(world) > 2)"
    command = [sys.executable, "-c", FEWER, sys.executable, "-c", fails]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith("2")) == ["20", "21"]
    assert "restart 1 of 2, on 2 ranks in place of 3" in done.stderr


def test_ranks_that_fail_once_they_were_asked_to_stop_are_not_started_again(tmp_path: Path) -> None:
    process = restarting(tmp_path, 9)
    deadline = time.monotonic() + 60
    while not (tmp_path / "attempt2").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGUSR1)
    _, printed = process.communicate(timeout=60)
    assert process.returncode == 9, printed
    assert not (tmp_path / "attempt3").exists()
