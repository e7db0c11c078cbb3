"""Two ranks that compute, one of them at a third of the other's speed: equal shares, measured shares, tickets, alone.

Takes nothing; gives images per second of a real model. The second rank shares its core with two processes that do
nothing but count, so that it gets a third of it; the first has a core of its own.

    python -m benchmarks.workers.real [--rounds 5] [--write]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.machine import measured_on
from benchmarks.ranks import run_on_ranks
from benchmarks.results import markdown_table, results, write_results
from models.registry import build_model
from parallel.comm.communicator import Communicator
from parallel.comm.local import LocalCommunicator
from parallel.engine.data_parallel import DataParallelEngine
from parallel.engine.step import Microbatch
from parallel.engine.tickets import DrawnMicrobatches, TicketEngine
from parallel.schedule.best_shares import best_counts
from parallel.schedule.shares import consecutive

ROOT = Path(__file__).parents[2]
OUT = ROOT / "bench-data"
M, BUSY = 24, 2
KINDS = ("equal", "shares", "tickets", "the fast rank alone")


def measure(communicator: Communicator, argument: dict[str, Any]) -> dict[str, Any]:
    """Seconds of a step of each kind, in turns, and the counts of the shares."""
    core = sorted(os.sched_getaffinity(0))[communicator.rank]
    os.sched_setaffinity(0, {core})
    counting = [
        subprocess.Popen([sys.executable, "-c", f"import os; os.sched_setaffinity(0, {{{core}}})\nwhile True: pass"])
        for _ in range(BUSY * communicator.rank)
    ]
    try:
        return _in_turns(communicator, argument["tile"], argument["rounds"])
    finally:
        for process in counting:
            process.kill()
            process.wait()


def _in_turns(communicator: Communicator, tile: int, rounds: int) -> dict[str, Any]:
    shape = (1, 3, tile, tile)
    one = Microbatch(torch.randn(shape), torch.zeros(1, dtype=torch.int64), shape)
    torch.manual_seed(0)

    def engine_of(kind: type[DataParallelEngine], ranks: Communicator, **shares: Any) -> DataParallelEngine:
        model: nn.Module = build_model("resnet18", classes=2, norm="batch", head="average")
        rule = torch.optim.SGD(model.parameters(), lr=0.0)
        return kind(model, F.cross_entropy, rule, ranks, batch=M, m=M, **shares)

    def step(engine: DataParallelEngine) -> list[float]:
        result = engine.step(DrawnMicrobatches(engine.share, lambda _: one), 0, 0.0)
        return [seconds for _, seconds in result.seconds]

    engines = {
        "equal": engine_of(DataParallelEngine, communicator),
        "tickets": engine_of(TicketEngine, communicator),
    }
    if communicator.rank == 0:
        engines["the fast rank alone"] = engine_of(DataParallelEngine, LocalCommunicator())
    step(engines["equal"])
    own = torch.zeros(communicator.world, dtype=torch.float64)
    own[communicator.rank] = statistics.median(step(engines["equal"]))
    communicator.all_reduce(own)
    counts = best_counts(M, own.tolist())
    engines["shares"] = engine_of(DataParallelEngine, communicator, shares=consecutive(counts))
    took: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for turn in range(1 + rounds):
        for kind in KINDS:
            communicator.barrier()
            begun_s = time.perf_counter()
            if kind in engines:
                step(engines[kind])
            if turn:
                took[kind].append(time.perf_counter() - begun_s)
    engines["tickets"].close()
    return {"took_s": took, "counts": counts, "seconds": own.tolist()}


def report(found: dict[str, Any], tile: int, rounds: int) -> str:
    """The table of the README."""
    medians = {kind: statistics.median(took) for kind, took in found["took_s"].items()}
    fast, slow = found["seconds"]
    rows = []
    for kind in KINDS:
        ratio = statistics.median(
            equal / each for equal, each in zip(found["took_s"]["equal"], found["took_s"][kind], strict=True)
        )
        named = f"shares {', '.join(map(str, found['counts']))}" if kind == "shares" else kind
        rows.append((named, f"{M / medians[kind]:.2f}", f"{ratio:.2f}x"))
    about = (
        f"ResNet-18 at {tile} px, {M} tiles a step, one a microbatch, which takes {fast * 1e3:.0f} ms on the one rank "
        f"and {slow * 1e3:.0f} ms on the other, {slow / fast:.2f} times as long; {rounds} rounds.\n"
    )
    table = markdown_table(("who computes what", "images/s", "times equal shares"), rows)
    return results("python -m benchmarks.workers.real --write", about, table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tile", type=int, default=256, help="px")
    parser.add_argument("--rounds", type=int, default=5, help="after one that is dropped")
    parser.add_argument("--write", action="store_true", help="put the table into README.md")
    arguments = parser.parse_args()
    argument = {"tile": arguments.tile, "rounds": arguments.rounds}
    found = run_on_ranks(2, "benchmarks.workers.real:measure", argument)[0]
    OUT.mkdir(exist_ok=True)
    kept = {**found, **argument, "environment": measured_on()}
    (OUT / "workers_real.json").write_text(json.dumps(kept, indent=2) + "\n")
    text = report(found, arguments.tile, arguments.rounds)
    print(text)
    if arguments.write:
        write_results(Path(__file__).with_name("README.md"), text, "two ranks that compute")


if __name__ == "__main__":
    main()
