"""Runs whose ranks cannot come together say so, once, in time: under torchrun and under mpirun.

Under srun: ``test_slurm.py``. A port that is taken and addresses that cannot be reached, in detail:
``tests/parallel/comm/test_torch_rendezvous.py``.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.app.conftest import ROOT, train_command, train_environment
from tests.helpers.ranks import MPI_ENVIRONMENT, MPIRUN

pytestmark = pytest.mark.process

TORCHRUN = str(Path(sys.executable).with_name("torchrun"))
LIMIT_S = 2
LATE = "test $RANK$PMI_RANK$OMPI_COMM_WORLD_RANK = 1 && sleep 120; exec "


def told(command: list[str], environment: dict[str, str], timeout_s: float = 140) -> str:
    """What a start prints that has to fail in time: on a busy machine, importing torch takes most of it."""
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env={**train_environment(), **MPI_ENVIRONMENT, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        printed, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        printed, _ = process.communicate()
        raise AssertionError(f"still there after {timeout_s:g} s\n{printed}") from None
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # the rank that sleeps
    assert process.returncode != 0
    return printed


def train(slides: Path, out: Path) -> list[str]:
    return train_command("--slides", slides, "--out", out, "--parallel", "ddp", f"--join-timeout-s={LIMIT_S}")


def errors(printed: str) -> list[str]:
    return [line for line in printed.splitlines() if "error: " in line]


@pytest.mark.parametrize("launcher", ["torchrun", "mpirun"])
def test_a_rank_that_does_not_come_is_named_once(launcher: str, tmp_path: Path) -> None:
    shell = ["sh", "-c", LATE + " ".join(train(tmp_path, tmp_path / "run"))]
    if launcher == "torchrun":
        printed = told([TORCHRUN, "--nproc-per-node=2", "--no-python", *shell], {})
        expected = r"rank 1 of 2 did not come within [\d.]+ s \(--join-timeout-s\): look for what they say"
    else:
        printed = told([str(MPIRUN), "-n", "2", *shell], {})
        expected = r"MPI did not start within 2 s \(--join-timeout-s\), which it does once all 2 ranks are there"
    (error,) = errors(printed)
    assert re.search(expected, error), printed


def test_a_port_that_is_taken(tmp_path: Path) -> None:
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        ranks = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        printed = told(train(tmp_path, tmp_path / "run"), {**ranks, "RANK": "0", "LOCAL_RANK": "0"})
    (error,) = errors(printed)
    assert f"cannot listen on port {port}, where the ranks are to meet (MASTER_PORT): Address already in use" in error


def test_a_network_interface_that_is_not_there(tmp_path: Path) -> None:
    printed = told(
        [TORCHRUN, "--nproc-per-node=2", "-m", *train(tmp_path, tmp_path / "run")[2:]],
        {"GLOO_SOCKET_IFNAME": "no-such-net"},
    )
    (error,) = errors(printed)
    assert "rank 0 of 2 on " in error
    assert "Unable to find address for: no-such-net; all ranks have come" in error
    assert "set GLOO_SOCKET_IFNAME" in error


def test_a_launcher_of_another_mpi(tmp_path: Path) -> None:
    printed = told(train(tmp_path, tmp_path / "run"), {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"})
    (error,) = errors(printed)
    assert "2 ranks were started, and MPI knows of 1: the launcher belongs to another MPI than mpi4py's" in error
