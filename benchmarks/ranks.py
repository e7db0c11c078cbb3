"""A function on several ranks of this machine, as a user's run is started: one process a rank, one thread each, Gloo.

Takes the function as ``package.module:function`` and one argument that JSON can hold; gives what each rank returned,
which JSON can hold too. What the ranks print goes to the terminal.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
TIMEOUT_S = 900
"""How long a rank waits for another: longer than one rank alone computes while the others stand by."""


def run_on_ranks(world: int, target: str, argument: Any) -> list[Any]:
    """Results of ``target(communicator, argument)``, in order of rank.

    Raises:
        RuntimeError: a rank failed; it has printed why.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "argument.json").write_text(json.dumps(argument))
        start = "import sys; from parallel.comm.torch_launch import launch_ranks as launch; "
        start += f"sys.exit(launch({world}, sys.argv[1:]))"
        command = [sys.executable, "-c", start, sys.executable, "-m", "benchmarks.ranks", target, name]
        done = subprocess.run(command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"})
        if done.returncode:
            raise RuntimeError(f"{target} on {world} ranks ended with exit code {done.returncode}")
        return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world)]


def main() -> None:
    from parallel.comm.torch_comm import TorchCommunicator

    target, folder = sys.argv[1], Path(sys.argv[2])
    module, _, function = target.partition(":")
    torch.set_num_threads(1)
    communicator = TorchCommunicator(torch.device("cpu"), TIMEOUT_S)
    argument = json.loads((folder / "argument.json").read_text())
    result = getattr(importlib.import_module(module), function)(communicator, argument)
    (folder / f"{communicator.rank}.json").write_text(json.dumps(result))
    communicator.close()


if __name__ == "__main__":
    main()
