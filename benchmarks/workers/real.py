"""Two ranks that compute, one of them at a third of the other's speed: equal shares, measured shares, alone.

Takes nothing; gives images per second of a real model. The second rank is stopped for two thirds of the time, a few
hundredths of a second at once; each has a core of its own.

    python -m benchmarks.workers.real [--rounds 15] [--write]
"""

from __future__ import annotations

import functools
import itertools
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.ranks import run_on_ranks
from benchmarks.results import finish, markdown_table, measured_on, parser_of, publish, results, write_json
from benchmarks.timing import in_turns
from benchmarks.whole_engine import whole_engine
from models.registry import build_model
from parallel.comm.communicator import Communicator
from parallel.comm.thread_comm import LocalCommunicator
from parallel.engine.engine import Engine
from parallel.engine.step import Microbatch
from parallel.schedule.shares import best_counts, consecutive

SLOWER = 3
"""Times as long as the first rank takes, that a microbatch should take the second."""

ALLOWED = (2.5, 3.5)
"""Measured; a machine that others use gives something else, which is not what the table is about."""

THROTTLE = """
import os, signal, sys, time
rank, run_s, stopped_s = int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])
ended = []
signal.signal(signal.SIGTERM, lambda *_: ended.append(True))  # never between the two signals
while os.getppid() == rank and not ended:
    os.kill(rank, signal.SIGSTOP)
    time.sleep(stopped_s)
    os.kill(rank, signal.SIGCONT)
    time.sleep(run_s)
"""
RUN_S = 0.02
KINDS = ("equal", "shares", "the fast rank alone")


def measure(communicator: Communicator, argument: dict[str, Any]) -> dict[str, Any]:
    """Seconds of a step of each kind, in turns, and the counts of the shares."""
    core = sorted(os.sched_getaffinity(0))[communicator.rank]
    os.sched_setaffinity(0, {core})
    words = [sys.executable, "-c", THROTTLE, str(os.getpid()), str(RUN_S), str(RUN_S * (SLOWER - 1))]
    throttles = [subprocess.Popen(words) for _ in range(communicator.rank)]
    try:
        return _in_turns(communicator, argument["tile"], argument["tiles"], argument["rounds"])
    finally:
        for throttle in throttles:
            throttle.terminate()
            throttle.wait()


def _in_turns(communicator: Communicator, tile: int, tiles: int, rounds: int) -> dict[str, Any]:
    shape = (1, 3, tile, tile)
    one = Microbatch(torch.randn(shape), torch.zeros(1, dtype=torch.int64), shape)
    torch.manual_seed(0)

    def engine_of(ranks: Communicator, **shares: Any) -> Engine:
        model: nn.Module = build_model("resnet18", classes=2, norm="batch", head="average")
        rule = functools.partial(torch.optim.SGD, lr=0.0)
        return whole_engine(model, F.cross_entropy, rule, ranks, batch=tiles, m=tiles, shape=shape, **shares)

    def step(engine: Engine) -> list[float]:
        result = engine.step(itertools.repeat(one), 0, 0.0)
        return [seconds for _, seconds in result.seconds]

    engines = {"equal": engine_of(communicator)}
    if communicator.rank == 0:
        engines["the fast rank alone"] = engine_of(LocalCommunicator())

    def of_ranks(seconds: list[float]) -> list[float]:
        table = torch.zeros(communicator.world, dtype=torch.float64)
        table[communicator.rank] = statistics.median(seconds)
        communicator.all_reduce(table)
        found: list[float] = table.tolist()
        return found

    step(engines["equal"])
    counts = best_counts(tiles, of_ranks([each for _ in range(3) for each in step(engines["equal"])]))
    engines["shares"] = engine_of(communicator, shares=consecutive(counts))
    own: list[float] = []
    ways: dict[str, Callable[[], object]] = dict.fromkeys(KINDS, lambda: None)
    ways |= {kind: functools.partial(step, engine) for kind, engine in engines.items()}
    ways["equal"] = lambda: own.extend(step(engines["equal"]))
    took = in_turns(ways, rounds, communicator.barrier)
    walls = {kind: [each.wall for each in of_kind] for kind, of_kind in took.items()}
    return {"took_s": walls, "counts": counts, "seconds": of_ranks(own)}


def report(found: dict[str, Any], tile: int, tiles: int, rounds: int) -> str:
    """The table of the README."""
    medians = {kind: statistics.median(took) for kind, took in found["took_s"].items()}
    fast, slow = found["seconds"]
    rows = []
    for kind in KINDS:
        ratio = statistics.median(
            equal / each for equal, each in zip(found["took_s"]["equal"], found["took_s"][kind], strict=True)
        )
        named = f"shares {', '.join(map(str, found['counts']))}" if kind == "shares" else kind
        rows.append((named, f"{tiles / medians[kind]:.2f}", f"{ratio:.2f}x"))
    about = (
        f"ResNet-18 at {tile} px, {tiles} tiles a step, one a microbatch, which takes {fast * 1e3:.0f} ms on the one "
        f"rank and {slow * 1e3:.0f} ms on the other, {slow / fast:.2f} times as long; {rounds} rounds.\n"
    )
    table = markdown_table(("who computes what", "images/s", "times equal shares"), rows)
    return results(about, table)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--tile", type=int, default=128, help="px")
    parser.add_argument("--tiles", type=int, default=24, help="of a step, one a microbatch")
    parser.add_argument("--rounds", type=int, default=15, help="after one that is dropped")
    arguments = parser.parse_args()
    argument = {"tile": arguments.tile, "tiles": arguments.tiles, "rounds": arguments.rounds}
    found = run_on_ranks(2, "benchmarks.workers.real:measure", argument)[0]
    write_json("workers_real", {**found, **argument, "environment": measured_on()})
    text = report(found, arguments.tile, arguments.tiles, arguments.rounds)
    fast, slow = found["seconds"]
    within = ALLOWED[0] <= slow / fast <= ALLOWED[1]
    publish(__file__, text, arguments.write and within, "two ranks that compute")
    finish(
        [] if within else [f"the second rank takes {slow / fast:.2f} times as long, {SLOWER} are asked: not written"]
    )


if __name__ == "__main__":
    main()
