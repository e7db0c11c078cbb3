"""The launcher's promises: exit codes come through, signals reach the ranks, one failing rank ends the others."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

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
    return subprocess.Popen([sys.executable, "-c", START, str(script), str(folder), str(code)], text=True)


def test_exit_code_of_a_failing_rank_comes_through_and_ends_the_other(tmp_path: Path) -> None:
    process = start(tmp_path, 7)
    assert process.wait(timeout=60) == 7
    assert (tmp_path / "signal0").read_text() == str(int(signal.SIGTERM))


def test_signal_is_handed_to_every_rank_and_the_run_ends_well(tmp_path: Path) -> None:
    process = start(tmp_path, 0)
    deadline = time.monotonic() + 60
    while not all((tmp_path / rank).exists() for rank in "01"):
        assert time.monotonic() < deadline, "ranks did not start"
        time.sleep(0.05)
    process.send_signal(signal.SIGUSR1)
    assert process.wait(timeout=60) == 0
    assert [(tmp_path / f"signal{rank}").read_text() for rank in "01"] == [str(int(signal.SIGUSR1))] * 2
