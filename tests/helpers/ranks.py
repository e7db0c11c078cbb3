"""Run a function on several ranks, as a user's run is started, with a hard time limit.

The function is named ``package.module:function``, gets a communicator and what ``argument`` holds, and its result is
saved per rank. Ranks are forked as ``--ranks`` forks them (Gloo), processes of mpirun, or threads of this process. A
hang is a failure that says which ranks were still at it.
"""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any, Literal

import torch

from benchmarks.ranks import AS_IN_A_CONTAINER, MPIRUN
from parallel.comm.communicator import Communicator
from parallel.comm.thread_comm import run_on_threads
from tests.helpers.forked import run_ranks

ROOT = Path(__file__).parents[2]


def run_on_ranks(
    world: int,
    target: str,
    folder: Path,
    argument: Any = None,
    timeout_s: float = 150,
    *,
    launcher: Literal["forked", "mpi", "threads"] = "forked",
    patience_s: float = 60,
) -> list[Any]:
    """Results of ``target(communicator, argument)`` on each of ``world`` ranks, in order of rank.

    Args:
        patience_s: how long an operation of the communicator waits.

    Raises:
        AssertionError: a rank failed, or they did not all end within ``timeout_s``; holds what they printed.
    """
    if launcher == "threads":
        return run_on_threads(world, function_of(target), argument, timeout_s=patience_s)
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(argument, folder / "argument.pt")
    words = [target, str(folder), launcher, str(patience_s)]
    if launcher == "forked":
        codes, printed = run_ranks(world, "tests.helpers.ranks", words, folder, timeout_s)
        hung, failed = codes == [None] * world, any(code != 0 for code in codes)
    else:
        hung, failed, printed = _start_mpi(world, words, timeout_s)
    if hung:
        missing = [rank for rank in range(world) if not (folder / f"{rank}.pt").exists()]
        raise AssertionError(f"{target}: ranks {missing} hung for {timeout_s:g} s\n{printed}")
    assert not failed, f"{target} on {world} ranks failed\n{printed}"
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(world)]


def _start_mpi(world: int, words: list[str], timeout_s: float) -> tuple[bool, bool, str]:
    """Whether processes of mpirun hung, or failed, and what they printed."""
    process = subprocess.Popen(
        [str(MPIRUN), "-n", str(world), sys.executable, "-m", "tests.helpers.ranks", *words],
        cwd=ROOT,
        env={**os.environ, **AS_IN_A_CONTAINER, "OMP_NUM_THREADS": "1"},
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
        return True, False, printed
    return False, process.returncode != 0, printed


def function_of(target: str) -> Any:
    module, _, function = target.partition(":")
    return getattr(importlib.import_module(module), function)


def main() -> None:
    target, folder, launcher, patience_s = sys.argv[1], Path(sys.argv[2]), sys.argv[3], float(sys.argv[4])
    torch.set_num_threads(1)
    communicator: Communicator
    if launcher == "mpi":
        from parallel.comm.mpi_comm import MpiCommunicator

        communicator = MpiCommunicator(patience_s)
    else:
        from parallel.comm.torch_comm import TorchCommunicator

        communicator = TorchCommunicator(torch.device("cpu"), patience_s, patience_s)
    argument = torch.load(folder / "argument.pt", weights_only=True)
    try:
        result = function_of(target)(communicator, argument)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        communicator.abort()
        raise
    torch.save(result, folder / f"{communicator.rank}.pt")
    communicator.close()


if __name__ == "__main__":
    main()
