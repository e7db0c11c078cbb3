"""A function on several ranks of this machine, as a user's run is started: one process a rank, one thread each.

Takes the function as ``package.module:function`` and one argument that JSON can hold; gives what each rank returned,
which JSON can hold too. Ranks talk over Gloo or MPI. What they print goes to the terminal.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any, Literal

import torch

from benchmarks.launching import AS_IN_A_CONTAINER
from parallel.comm.communicator import Communicator

ROOT = Path(__file__).parents[1]
TIMEOUT_S = 900
"""How long a rank waits for another: longer than one rank alone computes while the others stand by."""


MPIRUN = Path(sys.executable).with_name("mpirun")


def run_on_ranks(
    world: int,
    target: str,
    argument: Any,
    *,
    launcher: Literal["torch", "mpi"] = "torch",
    timeout_s: float = TIMEOUT_S,
) -> list[Any]:
    """Results of ``target(communicator, argument)``, in order of rank.

    Args:
        launcher: torch: Gloo; mpi: the mpirun beside this Python.
        timeout_s: how long a rank waits for another.

    Raises:
        RuntimeError: a rank failed; it has printed why.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "argument.json").write_text(json.dumps(argument))
        rank = [sys.executable, "-m", "benchmarks.ranks", target, name, launcher, str(timeout_s)]
        if launcher == "mpi":
            command = [str(MPIRUN), "-n", str(world), *rank]
        else:
            start = "import sys; from parallel.comm.torch_launch import launch_ranks as launch; "
            start += f"sys.exit(launch({world}, sys.argv[1:]))"
            command = [sys.executable, "-c", start, *rank]
        done = subprocess.run(command, cwd=ROOT, env={**os.environ, **AS_IN_A_CONTAINER, "OMP_NUM_THREADS": "1"})
        if done.returncode:
            raise RuntimeError(f"{target} on {world} ranks ended with exit code {done.returncode}")
        return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world)]


def main() -> None:
    target, folder, launcher, timeout_s = sys.argv[1], Path(sys.argv[2]), sys.argv[3], float(sys.argv[4])
    module, _, function = target.partition(":")
    torch.set_num_threads(1)
    communicator: Communicator
    if launcher == "mpi":
        from parallel.comm.mpi_comm import MpiCommunicator

        communicator = MpiCommunicator(timeout_s)
    else:
        from parallel.comm.torch_comm import TorchCommunicator

        communicator = TorchCommunicator(torch.device("cpu"), timeout_s, timeout_s)
    argument = json.loads((folder / "argument.json").read_text())
    try:
        result = getattr(importlib.import_module(module), function)(communicator, argument)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        communicator.abort()
        raise
    (folder / f"{communicator.rank}.json").write_text(json.dumps(result))
    communicator.close()


if __name__ == "__main__":
    main()
