"""The launcher's promises: exit codes come through, signals reach the ranks, one failing rank ends the others."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from app.train import LOADED_BY_RANKS

pytestmark = pytest.mark.process

START = """
import sys
from parallel.comm.launch import RankServer

with RankServer(sys.argv[1:], ["json"]) as server:
    sys.exit(server.launch(2))
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
    (folder / "rank.py").write_text(RANK)
    (folder / "tmp").mkdir()
    command = [sys.executable, "-c", START, "rank", str(folder), str(code)]
    return subprocess.Popen(command, env={**finding(folder), "TMPDIR": str(folder / "tmp")}, text=True)


def finding(folder: Path) -> dict[str, str]:
    """The environment of a launcher whose ranks run a module in ``folder``."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), *sys.path])}


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


RESTARTS = START.replace("launch(2)", "launch(1, 2)")

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
    (folder / "attempt.py").write_text(ATTEMPT)
    command = [sys.executable, "-c", RESTARTS, "attempt", str(folder), str(failures)]
    return subprocess.Popen(command, env=finding(folder), stderr=subprocess.PIPE, text=True)


def test_ranks_that_fail_are_started_again_as_often_as_asked(tmp_path: Path) -> None:
    for failures, code in ((1, 0), (5, 13)):
        folder = tmp_path / str(failures)
        folder.mkdir()
        process = restarting(folder, failures)
        _, printed = process.communicate(timeout=60)
        assert process.returncode == code, printed
        assert len(list(folder.glob("attempt[0-9]"))) == min(failures + 1, 3)
        assert "a rank ended with exit code 11: restart 1 of 2" in printed


FEWER = START.replace("launch(2)", "launch(3, 2, lambda ranks: ranks - 1)")


def test_ranks_that_fail_may_be_started_again_as_fewer(tmp_path: Path) -> None:
    fails = "import os, pathlib, sys; world = os.environ['WORLD_SIZE']; "
    fails += f"pathlib.Path({str(tmp_path)!r}, world + os.environ['RANK']).touch(); sys.exit(int(world) > 2)"
    (tmp_path / "fails.py").write_text(fails)
    command = [sys.executable, "-c", FEWER, "fails"]
    done = subprocess.run(command, env=finding(tmp_path), stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in tmp_path.iterdir() if path.name[0] == "2") == ["20", "21"]
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


SHOWS = """
import atexit, json, os, pathlib, random, signal, sys, numpy
folder = pathlib.Path(sys.argv[1])
atexit.register(lambda: (folder / f"{os.environ['RANK']}.exited").touch())
mask = signal.pthread_sigmask(signal.SIG_BLOCK, [])
text = {"argv": sys.argv, "name": __name__, "blocked": len(mask), "session": os.getsid(0) == os.getpid()}
text |= {"numbers": [random.random(), numpy.random.rand()], "home": os.environ.get("HOME")}
text |= {"shown": pathlib.Path("/proc/self/comm").read_text().strip(), "group": len(os.listdir("/proc/self/task"))}
(folder / os.environ["RANK"]).write_text(json.dumps(text))
"""


def test_a_rank_is_like_a_new_process(tmp_path: Path) -> None:
    (tmp_path / "shows.py").write_text(SHOWS)
    command = [sys.executable, "-c", START.replace("json", "numpy"), "shows", str(tmp_path), "--flag", "two words"]
    subprocess.run(command, env=finding(tmp_path), timeout=60, check=True)
    shown = [json.loads((tmp_path / rank).read_text()) for rank in "01"]
    for rank, of_rank in enumerate(shown):
        assert of_rank["argv"] == [str(tmp_path / "shows.py"), str(tmp_path), "--flag", "two words"]
        assert (of_rank["name"], of_rank["blocked"], of_rank["session"]) == ("__main__", 0, True)
        assert (of_rank["shown"], of_rank["home"]) == (f"rank {rank}", os.environ.get("HOME"))
        assert (tmp_path / f"{rank}.exited").exists()
    assert set(shown[0]["numbers"]).isdisjoint(shown[1]["numbers"])


def test_what_ranks_of_a_run_load_starts_no_thread_and_no_gpu(tmp_path: Path) -> None:
    look = "import os, pathlib, sys, torch; (folder := pathlib.Path(sys.argv[1])); "
    look += "threads = [pathlib.Path(f'/proc/{os.getppid()}/task/{t}/comm').read_text().strip() "
    look += "for t in os.listdir(f'/proc/{os.getppid()}/task')]; "
    look += "(folder / os.environ['RANK']).write_text(f'{threads} {torch.cuda.is_initialized()}')"
    (tmp_path / "look.py").write_text(look)
    start = START.replace('["json"]', repr(list(LOADED_BY_RANKS)))
    subprocess.run([sys.executable, "-c", start, "look", str(tmp_path)], env=finding(tmp_path), timeout=120, check=True)
    # OpenBLAS ends its threads for a fork; jemalloc, which is Arrow's, is made to be forked beside its own.
    assert {(tmp_path / rank).read_text() for rank in "01"} <= {
        f"{threads} False" for threads in (["python"], ["python", "jemalloc_bg_thd"])
    }


def test_a_server_that_is_killed_ends_the_run(tmp_path: Path) -> None:
    (tmp_path / "kills.py").write_text("import os, signal, time; os.kill(os.getppid(), signal.SIGKILL); time.sleep(60)")
    done = subprocess.run([sys.executable, "-c", START, "kills"], env=finding(tmp_path), timeout=50, check=False)
    assert done.returncode == 128 + signal.SIGKILL


def test_a_module_that_cannot_be_loaded_ends_the_run(tmp_path: Path) -> None:
    command = [sys.executable, "-c", START.replace("json", "no_such_module"), "shows"]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "No module named 'no_such_module'" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_the_server_loads_ends_the_run(tmp_path: Path, number: signal.Signals) -> None:
    (tmp_path / "slow.py").write_text(
        f"import pathlib, time; pathlib.Path({str(tmp_path)!r}, 'loads').touch(); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", START.replace("json", "slow"), "shows"], env=finding(tmp_path))
    while not (tmp_path / "loads").exists():
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(number)
    assert process.wait(10) == 128 + number
