"""Run a function on several ranks of this machine, each a process of one thread, as a user's run is started.

Takes the function as ``package.module:function`` and one argument that JSON can hold; gives what each rank returned, as
JSON. Ranks talk over Gloo, NCCL or MPI. What they print goes to the terminal.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import torch

from parallel.comm.communicator import Communicator
from parallel.comm.launch import kill_tree

ROOT = Path(__file__).parents[1]
AS_IN_A_CONTAINER = {
    # Open MPI refuses to run as root, and more ranks than cores; MPICH reads none of these.
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}
TIMEOUT_S = 900
"""Seconds that a rank waits for another: more than one rank computes alone while the others stand by."""


MPIRUN = Path(sys.executable).with_name("mpirun")


def run_on_ranks(
    world: int,
    target: str,
    argument: Any,
    *,
    launcher: Literal["torch", "mpi"] = "torch",
    timeout_s: float = TIMEOUT_S,
    limit_s: float | None = None,
    device: str = "cpu",
    env: Mapping[str, str] = MappingProxyType({}),
) -> list[Any]:
    """Return ``target(communicator, argument)`` of each rank, in order of rank.

    Args:
        launcher: torch: Gloo or NCCL; mpi: the mpirun next to this Python.
        timeout_s: that a rank waits for another.
        limit_s: after which ranks that still run are ended; None: no limit.
        device: cuda: each rank of torch takes a GPU, in turn, and talks over NCCL if no other rank has the same.
        env: added to the variables of this process.

    Raises:
        RuntimeError: a rank failed, with the first line of its error; or the limit was reached.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "argument.json").write_text(json.dumps(argument))
        rank = [sys.executable, "-m", "benchmarks.ranks", target, name, launcher, str(timeout_s), device]
        if launcher == "mpi":
            command = [str(MPIRUN), "-n", str(world), *rank]
        else:
            start = "import sys; from parallel.comm.launch import RankServer as S; s = S(sys.argv[1:], ['torch']); "
            command = [sys.executable, "-c", f"{start}sys.exit(s.launch({world}))", *rank[2:]]
        process = subprocess.Popen(
            command, cwd=ROOT, env={**os.environ, **AS_IN_A_CONTAINER, "OMP_NUM_THREADS": "1", **env}
        )
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            kill_tree(process)
            raise RuntimeError(f"still running after {limit_s:.0f} s") from None
        if code:
            errors = sorted(folder.glob("*.error"), key=lambda file: file.stat().st_mtime_ns)
            reason = f": {errors[0].read_text()}" if errors else ""
            raise RuntimeError(f"{target} on {world} ranks ended with exit code {code}{reason}")
        return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world)]


def main() -> None:
    target, name, launcher, seconds, kind = sys.argv[1:]
    folder, timeout_s, device = Path(name), float(seconds), torch.device(kind)
    module, _, function = target.partition(":")
    torch.set_num_threads(1)
    communicator: Communicator
    if launcher == "mpi":
        from parallel.comm.mpi_comm import MpiCommunicator

        communicator = MpiCommunicator(timeout_s)
    else:
        from parallel.comm.torch_comm import TorchCommunicator

        if device.type == "cuda":
            device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
            torch.cuda.set_device(device)
        communicator = TorchCommunicator(device, timeout_s, timeout_s)
    argument = json.loads((folder / "argument.json").read_text())
    try:
        result = getattr(importlib.import_module(module), function)(communicator, argument)
    except BaseException as fault:
        (folder / f"{communicator.rank}.error").write_text(traceback.format_exception_only(fault)[0].splitlines()[0])
        traceback.print_exc()
        sys.stderr.flush()
        communicator.abort()
        raise
    (folder / f"{communicator.rank}.json").write_text(json.dumps(result))
    communicator.close()


if __name__ == "__main__":
    main()
