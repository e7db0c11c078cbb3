"""Nobody but the ranks of a run gets at it: no port is open to other hosts, and none takes orders from a stranger."""

from __future__ import annotations

import base64
import contextlib
import functools
import ipaddress
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
from torch._C._distributed_c10d import TCPStore

from parallel.comm.torch_rendezvous import call_with_timeout

pytestmark = pytest.mark.process

START = "import sys; from parallel.comm.launch import RankServer; "
START += "sys.exit(RankServer(sys.argv[1:], ['parallel.comm.torch_comm']).launch(2))"

RANK = """
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

SECOND = timedelta(seconds=1)
SEEN_BY_TORCHRUN_S = 6
"""The agent of torch's rendezvous reads its state from the store every five seconds."""


class Order:
    """Unpickled, it leaves a file."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return os.mkdir, (str(self.trace),)


def environment(folder: Path) -> dict[str, str]:
    """That of a launcher whose ranks run a module in ``folder``."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(folder), *sys.path])}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[psutil.Process]:
    """What started two ranks, which have joined and wait for the file "go"; strangers are no reason to fail."""
    tmp_path = tmp_path_factory.mktemp("run")
    (tmp_path / "rank.py").write_text(RANK)
    command = [sys.executable, "-c", START, "rank", str(tmp_path)]
    starter = subprocess.Popen(command, env=environment(tmp_path))
    try:
        deadline = time.monotonic() + 60
        while len(list(tmp_path.glob("*.joined"))) < 2:
            assert starter.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        yield psutil.Process(starter.pid)
        (tmp_path / "go").touch()
        assert starter.wait(60) == 0
        assert [(tmp_path / f"{rank}.sum").read_text() for rank in range(2)] == ["[2.0, 2.0, 2.0]"] * 2
    finally:
        starter.kill()
        starter.wait()


IMPOSTOR = """
import os, sys, torch
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
    (tmp_path / "rank.py").write_text(IMPOSTOR)
    command = [sys.executable, "-c", START, "rank"]
    done = subprocess.run(command, env=environment(tmp_path), capture_output=True, text=True, timeout=60)
    assert done.returncode == 3
    assert "what answers as rank 1 does not know the key of this run" in done.stdout


def listeners(starter: psutil.Process) -> list[tuple[str, int]]:
    tree = [starter, *starter.children(recursive=True)]
    connections = [each for process in tree for each in process.net_connections("inet")]
    return [tuple(each.laddr) for each in connections if each.status == psutil.CONN_LISTEN or each.type != 1]


def test_a_run_on_one_machine_listens_on_loopback_alone(run: psutil.Process) -> None:
    found = listeners(run)
    assert found, "Gloo listens at least"
    assert [each for each in found if not ipaddress.ip_address(each[0]).is_loopback] == []


def test_a_stranger_cannot_have_a_run_unpickle_anything(run: psutil.Process, tmp_path: Path) -> None:
    trace = tmp_path / "code of a stranger ran"
    order = base64.b64encode(pickle.dumps(Order(trace)))
    stores = 0
    for _, port in listeners(run):
        with contextlib.suppress(RuntimeError, TimeoutError):
            store = call_with_timeout(
                functools.partial(TCPStore, "127.0.0.1", port, wait_for_workers=False, timeout=SECOND), 2
            )
            stores += 1
            for key in store.list_keys():
                store.set(key, order)
    if stores:
        time.sleep(SEEN_BY_TORCHRUN_S)
    assert not trace.exists(), "the run executed what a stranger put into its store"
    assert not stores, "the run keeps a store that strangers can write to"
