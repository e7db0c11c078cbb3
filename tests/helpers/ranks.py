"""Run a function on several ranks, as a user's run is started, with a hard time limit.

The function is named ``package.module:function``, gets a ``TorchCommunicator`` and what ``argument`` holds, and its
result is saved per rank. A hang is a failure that says which ranks were still at it.
"""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[2]


def run_on_ranks(world: int, target: str, folder: Path, argument: Any = None, timeout_s: float = 150) -> list[Any]:
    """Results of ``target(communicator, argument)`` on each of ``world`` ranks, in order of rank.

    Raises:
        AssertionError: a rank failed, or they did not all end within ``timeout_s``; holds what they printed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(argument, folder / "argument.pt")
    start = "import sys; from parallel.comm.torch_launch import launch_ranks as launch; "
    start += f"sys.exit(launch({world}, sys.argv[1:]))"
    command = [sys.executable, "-c", start, sys.executable, "-m", "tests.helpers.ranks", target, str(folder)]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
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
        missing = [rank for rank in range(world) if not (folder / f"{rank}.pt").exists()]
        raise AssertionError(f"{target}: ranks {missing} hung for {timeout_s:g} s\n{printed}") from None
    assert process.returncode == 0, f"{target} on {world} ranks: exit code {process.returncode}\n{printed}"
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(world)]


def main() -> None:
    from parallel.comm.torch_comm import TorchCommunicator

    target, folder = sys.argv[1], Path(sys.argv[2])
    module, _, function = target.partition(":")
    torch.set_num_threads(1)
    communicator = TorchCommunicator(torch.device("cpu"), timeout_s=60)
    argument = torch.load(folder / "argument.pt", weights_only=True)
    result = getattr(importlib.import_module(module), function)(communicator, argument)
    torch.save(result, folder / f"{communicator.rank}.pt")
    communicator.barrier()
    communicator.close()


if __name__ == "__main__":
    main()
