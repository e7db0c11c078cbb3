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
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import torch

from benchmarks.launching import AS_IN_A_CONTAINER
from parallel.comm.communicator import Communicator
from parallel.comm.launch import kill_tree

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
    limit_s: float | None = None,
    device: str = "cpu",
    env: Mapping[str, str] = MappingProxyType({}),
) -> list[Any]:
    """Results of ``target(communicator, argument)``, in order of rank.

    Args:
        launcher: torch: Gloo or NCCL; mpi: the mpirun beside this Python.
        timeout_s: how long a rank waits for another.
        limit_s: seconds after which ranks that are still at it are ended; None: no limit.
        device: cuda: of torch's ranks each takes a GPU, in turn, and talks over NCCL if each has its own.
        env: variables beside those of this process.

    Raises:
        RuntimeError: a rank failed, and has printed why: the first line of its error; or the limit was reached.
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
            told = f": {errors[0].read_text()}" if errors else ""
            raise RuntimeError(f"{target} on {world} ranks ended with exit code {code}{told}")
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
