"""The launcher's promises: exit codes come through, signals reach the ranks, one failing rank ends the others; nobody
but the ranks of a run gets at it."""

from __future__ import annotations

import base64
import contextlib
import functools
import ipaddress
import json
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
from torch._C._distributed_c10d import TCPStore

from app.train import LOADED_BY_RANKS
from parallel.comm.launch import RankServer
from parallel.comm.torch_rendezvous import call_with_timeout

pytestmark = pytest.mark.process

START = """
import sys
from parallel.comm.launch import RankServer

with RankServer(sys.argv[1:], ["json"]) as server:
    sys.exit(server.launch(2))
"""
TORCH = START.replace("json", "parallel.comm.torch_comm")


def start(folder: Path, script: str, *words: object, program: str = START) -> subprocess.Popen[str]:
    """Start a launcher whose ranks run ``script``; it leaves what it needs in ``folder``, its first argument."""
    (folder / "ranks.py").write_text(script)
    (folder / "tmp").mkdir()
    command = [sys.executable, "-c", program, "ranks", str(folder), *map(str, words)]
    paths = {"PYTHONPATH": os.pathsep.join([str(folder), *sys.path]), "TMPDIR": str(folder / "tmp")}
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **paths}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def wait_for(process: subprocess.Popen[str], *paths: Path) -> None:
    deadline = time.monotonic() + 60
    while not all(path.exists() for path in paths):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)


def ended(process: subprocess.Popen[str], code: int, timeout_s: float = 120) -> str:
    """What was printed until it ended with ``code``."""
    printed, _ = process.communicate(timeout=timeout_s)
    assert process.returncode == code, printed
    return printed


RANK = """
import os, pathlib, signal, sys, time
folder, code = pathlib.Path(sys.argv[1]), int(sys.argv[2])
got = []
for number in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, lambda n, _: got.append(n))
(folder / os.environ["RANK"]).touch()
if code and os.environ["RANK"] == "1":
    sys.exit(code)
end = time.monotonic() + 60
while not got and time.monotonic() < end:
    time.sleep(0.05)
(folder / ("signal" + os.environ["RANK"])).write_text(str(got[0] if got else "none"))
"""


def test_exit_code_of_a_failing_rank_comes_through_and_ends_the_other(tmp_path: Path) -> None:
    ended(start(tmp_path, RANK, 7), 7)
    assert (tmp_path / "signal0").read_text() == str(int(signal.SIGTERM))
    assert list((tmp_path / "tmp").iterdir()) == []


def test_signal_is_handed_to_every_rank_and_the_run_ends_well(tmp_path: Path) -> None:
    process = start(tmp_path, RANK, 0)
    wait_for(process, tmp_path / "0", tmp_path / "1")
    process.send_signal(signal.SIGUSR1)
    ended(process, 0)
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


@pytest.mark.parametrize(("failures", "code"), [(1, 0), (5, 13)])
def test_ranks_that_fail_are_started_again_as_often_as_asked(failures: int, code: int, tmp_path: Path) -> None:
    printed = ended(start(tmp_path, ATTEMPT, failures, program=RESTARTS), code)
    assert len(list(tmp_path.glob("attempt[0-9]"))) == min(failures + 1, 3)
    assert "a rank ended with exit code 11: restart 1 of 2" in printed


def test_ranks_that_fail_once_they_were_asked_to_stop_are_not_started_again(tmp_path: Path) -> None:
    process = start(tmp_path, ATTEMPT, 9, program=RESTARTS)
    wait_for(process, tmp_path / "attempt2")
    process.send_signal(signal.SIGUSR1)
    ended(process, 9)
    assert not (tmp_path / "attempt3").exists()


def test_ranks_that_fail_may_be_started_again_as_fewer(tmp_path: Path) -> None:
    fails = "import os, pathlib, sys; world = os.environ['WORLD_SIZE']; "
    fails += "pathlib.Path(sys.argv[1], world + os.environ['RANK']).touch(); sys.exit(int(world) > 2)"
    fewer = START.replace("launch(2)", "launch(3, 2, lambda ranks: ranks - 1)")
    assert "restart 1 of 2, on 2 ranks in place of 3" in ended(start(tmp_path, fails, program=fewer), 0)
    assert sorted(path.name for path in tmp_path.iterdir() if path.name[0] == "2") == ["20", "21"]


SHOWS = """
import atexit, json, os, pathlib, random, signal, sys, numpy
folder = pathlib.Path(sys.argv[1])
atexit.register(lambda: (folder / f"{os.environ['RANK']}.exited").touch())
mask = signal.pthread_sigmask(signal.SIG_BLOCK, [])
text = {"argv": sys.argv, "name": __name__, "blocked": len(mask), "session": os.getsid(0) == os.getpid()}
text |= {"numbers": [random.random(), numpy.random.rand()], "home": os.environ.get("HOME")}
text |= {"shown": pathlib.Path("/proc/self/comm").read_text().strip()}
(folder / os.environ["RANK"]).write_text(json.dumps(text))
"""


def test_a_rank_is_like_a_new_process(tmp_path: Path) -> None:
    ended(start(tmp_path, SHOWS, "--flag", "two words", program=START.replace("json", "numpy")), 0)
    shown = [json.loads((tmp_path / rank).read_text()) for rank in "01"]
    for rank, of_rank in enumerate(shown):
        assert of_rank["argv"] == [str(tmp_path / "ranks.py"), str(tmp_path), "--flag", "two words"]
        assert (of_rank["name"], of_rank["blocked"], of_rank["session"]) == ("__main__", 0, True)
        assert (of_rank["shown"], of_rank["home"]) == (f"rank {rank}", os.environ.get("HOME"))
        assert (tmp_path / f"{rank}.exited").exists()
    assert set(shown[0]["numbers"]).isdisjoint(shown[1]["numbers"])


LOOKS = """
import os, pathlib, sys, torch
tasks = pathlib.Path(f"/proc/{os.getppid()}/task")
threads = [(tasks / task / "comm").read_text().strip() for task in os.listdir(tasks)]
pathlib.Path(sys.argv[1], os.environ["RANK"]).write_text(f"{threads} {torch.cuda.is_initialized()}")
"""


def test_what_ranks_of_a_run_load_starts_no_thread_and_no_gpu(tmp_path: Path) -> None:
    ended(start(tmp_path, LOOKS, program=START.replace('["json"]', repr(list(LOADED_BY_RANKS)))), 0)
    # OpenBLAS ends its threads for a fork; jemalloc, which is Arrow's, is made to be forked beside its own.
    assert {(tmp_path / rank).read_text() for rank in "01"} <= {
        f"{threads} False" for threads in (["python"], ["python", "jemalloc_bg_thd"])
    }


WARNS = """
import os, warnings
fork = os.fork

def warned():
    child = fork()
    if child:
        text = "This process (pid=1) is multi-threaded, use of fork() may lead to deadlocks in the child."
        warnings.warn(text, DeprecationWarning, stacklevel=2)
    return child

os.fork = warned
"""
"""As Python does since 3.12."""


def test_threads_that_may_be_there_when_ranks_are_forked_give_no_warning(tmp_path: Path) -> None:
    (tmp_path / "warns.py").write_text(WARNS)
    assert "multi-threaded" not in ended(start(tmp_path, "", program=START.replace("json", "warns")), 0)


KILLED = """
import os, pathlib, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
folder = pathlib.Path(sys.argv[1])
if os.environ["RANK"] == "1":
    (folder / "rank").write_text(str(os.getpid()))
    os.kill(os.getpid(), signal.SIGKILL)
while not (folder / "rank").exists() or not (rank := (folder / "rank").read_text()):
    time.sleep(0.01)
time.sleep(0.5)
fields = pathlib.Path("/proc", rank, "stat").read_text().rpartition(")")[2].split()
(folder / "status").write_text(f"{fields[0]} {fields[-1]}")
"""


def test_how_a_rank_ended_can_be_read_for_as_long_as_the_run_lasts(tmp_path: Path) -> None:
    """On a busy machine a watchdog came too late: it said that the rank died, and not that it was killed."""
    ended(start(tmp_path, KILLED), 128 + signal.SIGKILL)
    assert (tmp_path / "status").read_text() == f"Z {signal.SIGKILL}"
    assert not psutil.pid_exists(int((tmp_path / "rank").read_text()))


def test_a_server_that_is_killed_or_cannot_load_a_module_ends_the_run(tmp_path: Path) -> None:
    kills = "import os, signal, time; os.kill(os.getppid(), signal.SIGKILL); time.sleep(60)"
    ended(start(tmp_path, kills), 128 + signal.SIGKILL)
    (tmp_path / "tmp").rmdir()
    printed = ended(start(tmp_path, "", program=START.replace("json", "no_such_module")), 1)
    assert "No module named 'no_such_module'" in printed


@pytest.mark.parametrize("unread", [True, False])
def test_a_server_that_is_killed_with_requests_on_their_way_counts_as_the_rank_that_failed(unread: bool) -> None:
    with RankServer(["json.tool"], ["json"]) as server:
        while not server.is_loaded:
            server.poll()
        os.kill(server.pid, signal.SIGSTOP)
        server.start({})
        if unread:
            server.poll()
        os.kill(server.pid, signal.SIGKILL)
        os.waitid(os.P_PID, server.pid, os.WEXITED | os.WNOWAIT)
        while server.are_running:
            server.poll()
        assert server.codes == {server.pid: -signal.SIGKILL}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_the_server_loads_ends_the_run(tmp_path: Path, number: signal.Signals) -> None:
    (tmp_path / "slow.py").write_text(
        f"import pathlib, time; pathlib.Path({str(tmp_path)!r}, 'loads').touch(); time.sleep(60)"
    )
    process = start(tmp_path, "", program=START.replace("json", "slow"))
    wait_for(process, tmp_path / "loads")
    process.send_signal(number)
    ended(process, 128 + number, timeout_s=10)


JOINS = """
import pathlib, sys, time, torch
from parallel.comm.torch_comm import TorchCommunicator

folder = pathlib.Path(sys.argv[1])
communicator = TorchCommunicator(torch.device("cpu"), 30, 30)
(folder / f"{communicator.rank}.joined").touch()
while not (folder / "go").exists():
    time.sleep(0.02)
total = torch.ones(3)
communicator.all_reduce(total)
(folder / f"{communicator.rank}.sum").write_text(str(total.tolist()))
communicator.close()
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[psutil.Process]:
    """What started two ranks, which have joined and wait for the file "go"; strangers are no reason to fail."""
    folder = tmp_path_factory.mktemp("run")
    starter = start(folder, JOINS, program=TORCH)
    try:
        wait_for(starter, folder / "0.joined", folder / "1.joined")
        yield psutil.Process(starter.pid)
        (folder / "go").touch()
        ended(starter, 0)
        assert [(folder / f"{rank}.sum").read_text() for rank in range(2)] == ["[2.0, 2.0, 2.0]"] * 2
    finally:
        starter.kill()
        starter.wait()


IMPOSTOR = """
import os, torch
from parallel.comm.torch_comm import TorchCommunicator

if os.environ["RANK"] == "1":
    os.environ["MEGATILE_KEY"] = "guessed"
try:
    TorchCommunicator(torch.device("cpu"), 30, 30)
except Exception as fault:
    print(fault, flush=True)
    os._exit(3)
"""


def test_who_does_not_know_the_key_of_the_run_is_no_rank(tmp_path: Path) -> None:
    printed = ended(start(tmp_path, IMPOSTOR, program=TORCH), 3)
    assert "what answers as rank 1 does not know the key of this run" in printed


def listeners(starter: psutil.Process) -> list[tuple[str, int]]:
    tree = [starter, *starter.children(recursive=True)]
    connections = [each for process in tree for each in process.net_connections("inet")]
    return [tuple(each.laddr) for each in connections if each.status == psutil.CONN_LISTEN or each.type != 1]


def test_a_run_on_one_machine_listens_on_loopback_alone(run: psutil.Process) -> None:
    found = listeners(run)
    assert found, "Gloo listens at least"
    assert [each for each in found if not ipaddress.ip_address(each[0]).is_loopback] == []


class Order:
    """Unpickled, it leaves a file."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return os.mkdir, (str(self.trace),)


SECOND = timedelta(seconds=1)
SEEN_BY_TORCHRUN_S = 6
"""The agent of torch's rendezvous reads its state from the store every five seconds."""


def test_a_stranger_cannot_have_a_run_unpickle_anything(run: psutil.Process, tmp_path: Path) -> None:
    trace = tmp_path / "code of a stranger ran"
    order = base64.b64encode(pickle.dumps(Order(trace)))
    stores = 0
    for _, port in listeners(run):
        with contextlib.suppress(RuntimeError, TimeoutError):
            open_store = functools.partial(TCPStore, "127.0.0.1", port, wait_for_workers=False, timeout=SECOND)
            store = call_with_timeout(open_store, 2)
            stores += 1
            for key in store.list_keys():
                store.set(key, order)
    if stores:
        time.sleep(SEEN_BY_TORCHRUN_S)
    assert not trace.exists(), "the run executed what a stranger put into its store"
    assert not stores, "the run keeps a store that strangers can write to"
