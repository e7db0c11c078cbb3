"""Measure all contenders in turn, round after round, on this rank; and one contender alone, for its memory.

Takes a communicator and numbers from ``run.py``; gives when each contender's steps began and ended.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, NamedTuple

from benchmarks.resident import resident, settle
from benchmarks.schedules.on_paper import simulated_steps_s
from benchmarks.schedules.ours import Ours
from benchmarks.schedules.peers import DataParallel, TorchPipeline
from benchmarks.schedules.workload import Contender, Workload
from parallel.comm.communicator import Communicator
from parallel.comm.thread_comm import LocalCommunicator
from parallel.offload.packing import ActivationMeter

WARM_UP = 1
MEMORY_STEPS = 2


def contenders(model: str, px: int, m: int, communicator: Communicator) -> Iterator[Contender]:
    """All of them, in the order of a round: those that are compared stand side by side."""
    whole, pair = Workload(model, px, m), Workload(model, px, 2)
    for schedule in ("gpipe", "1f1b"):
        yield Ours(schedule, whole, communicator)
        yield TorchPipeline(schedule, whole, communicator)
    yield Ours("mast", pair, communicator)
    yield DataParallel(pair, communicator)
    yield Ours("bidirectional", pair, communicator)
    yield Ours("bidirectional", whole, communicator)
    yield DataParallel(whole, communicator)
    yield Ours("ddp", whole, communicator)
    for schedule in ("master", "mp-basic", "interleaved", "zero-bubble", "pipedream"):
        yield Ours(schedule, whole, communicator)
    if communicator.rank == 0:
        yield Ours("mp-basic", whole, LocalCommunicator())
        yield DataParallel(whole)
    else:
        yield StandBy("engine on one rank")
        yield StandBy("plain loop")


class StandBy(NamedTuple):
    """The part of a rank in what another does alone."""

    name: str

    def step(self, number: int) -> None:
        """Do nothing; the barrier after it waits."""


def measure(communicator: Communicator, argument: dict[str, Any]) -> dict[str, Any]:
    """Seconds at which the steps of every contender began and ended, by round, and what they take on paper."""
    entered = list(contenders(argument["model"], argument["px"], argument["m"], communicator))
    rounds = []
    for number in range(WARM_UP + argument["rounds"]):
        times: dict[str, tuple[float, float]] = {}
        for contender in entered if number % 2 else reversed(entered):
            communicator.barrier()
            begun = time.perf_counter()
            contender.step(number)
            times[contender.name] = begun, time.perf_counter()
            if isinstance(contender, Ours) and number >= WARM_UP:
                contender.record()
        if number >= WARM_UP:
            rounds.append(times)
        if communicator.rank == 0:
            print(
                f"round {number - WARM_UP + 1}: " + ", ".join(f"{n} {b - a:.2f} s" for n, (a, b) in times.items()),
                flush=True,
            )
    simulated = {
        ours.name: simulated_steps_s(ours, communicator)
        for ours in entered
        if isinstance(ours, Ours) and ours.strategy.depth == communicator.world
    }
    return {"rounds": rounds, "simulated": simulated}


def measure_memory(communicator: Communicator, argument: dict[str, Any]) -> dict[str, int]:
    """Return peak bytes kept for backward, and growth of the process, of one contender alone in its processes.

    The first step is not counted: it loads code, and allocates gradients that stay.
    """
    work = Workload(argument["model"], argument["px"], argument["m"])
    meter = ActivationMeter()
    build = Ours if argument["whose"] == "ours" else TorchPipeline
    contender = build(argument["schedule"], work, communicator, meter)
    for number in range(WARM_UP):
        contender.step(number)
    settle()  # what the allocator keeps for later would hide growth
    communicator.barrier()
    before = resident("VmRSS")
    for number in range(WARM_UP, WARM_UP + MEMORY_STEPS):
        contender.step(number)
    return {"activation_bytes": meter.peak_bytes, "growth_bytes": resident("VmHWM") - before}
