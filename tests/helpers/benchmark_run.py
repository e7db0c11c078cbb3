"""A benchmark's command, as its README shows it but shortened, run to its end; what it measures is not judged.

It runs in a process forked from one that has loaded torch, and so do its ranks. ``test_gpu_benchmark`` starts both one
by one.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import benchmarks.ranks
from tests.helpers.forked import run_module, run_ranks, shared_server

STARTED = benchmarks.ranks.run_on_ranks


def assert_runs(command: str, says: str) -> None:
    """``python -m command`` ends well, or misses a target, and prints ``says``."""
    with tempfile.TemporaryDirectory() as folder:
        (code,), printed = run_ranks(1, f"{__name__}:run", command.split(), Path(folder), timeout_s=250)
    # 1: a target was missed, which a busy machine does.
    assert code in (0, 1), printed
    assert says in printed, printed


def run(module: str, *arguments: str) -> None:
    """In the forked process: the command alone on its machine, its ranks forked too."""
    shared_server()  # while this process has no threads
    benchmarks.ranks.run_on_ranks = run_on_forked_ranks
    for variable in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        del os.environ[variable]
    run_module(module, arguments)


def run_on_forked_ranks(
    world: int, target: str, argument: Any, *, launcher: Any = "torch", timeout_s: float = 200, **others: Any
) -> list[Any]:
    """As ``benchmarks.ranks.run_on_ranks``; ranks of torch are forked, on the CPU."""
    if launcher != "torch":
        return STARTED(world, target, argument, launcher=launcher, timeout_s=timeout_s)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "argument.json").write_text(json.dumps(argument))
        words = [target, name, launcher, str(timeout_s), others.get("device", "cpu")]
        codes, printed = run_ranks(world, "benchmarks.ranks", words, folder, others.get("limit_s", timeout_s))
        print(printed)
        if any(codes):
            raise RuntimeError(f"{target} on {world} ranks ended with {codes}")
        return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world)]
