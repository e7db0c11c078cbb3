"""The cells of the table of ways of keeping: which model, kept how, under which schedule.

Takes nothing; gives cells as plain values, each with the settings a user would give. Letters: m microbatches.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from app.planning.workload import Workload
from app.settings.strategy import StrategySettings
from parallel.graph.partition import Partition, equal_cost
from parallel.memory.policy import ActivationPolicy, Recompute
from parallel.memory.rank_bytes import rank_bytes
from parallel.memory.recompute_ranks import chosen_runs
from parallel.memory.stage_memory import StageMemory
from parallel.strategy import Strategy

CLASSES, RANKS = 3, 2
SCHEDULES = ("gpipe", "1f1b", "master", "bidirectional", "ddp")
ENLARGED = 16
"""A plan is made for tiles that much larger, whose activations outweigh the parameters."""


@dataclass(frozen=True)
class Subject:
    """A model of the table.

    Attributes:
        model: as for ``--model``.
        tile: px; the smallest that leaves batch norm several values a channel.
        batch: tiles of all m microbatches.
        ahead: bytes for overlap with some room: a few of the model's tensors, not all.
    """

    name: str
    model: str
    tile: int
    batch: int
    ahead: str
    m: int = 3
    steps: int = 1


SUBJECTS = {
    subject.name: subject
    for subject in (
        Subject("dropout", "benchmarks.exactness.models:Dropouts", 12, 4, "16KiB", steps=2),
        Subject("unet", "unet", 32, 3, "512KiB"),
        Subject("resnet50", "resnet50", 64, 3, "1MiB"),
    )
}
PLANNED = "as planned"
WAYS: dict[str, dict[str, Any]] = {
    "offload overlap": {"offload": "overlap"},
    "offload overlap, ahead": {"offload": "overlap", "offload_ahead": PLANNED},
    "recompute stage": {"recompute": "stage"},
    "recompute block": {"recompute": "block"},
    "recompute optimal": {"recompute": "optimal", "recompute_runs": PLANNED},
    "block + overlap": {"recompute": "block", "offload": "overlap"},
    "block + overlap, ahead": {"recompute": "block", "offload": "overlap", "offload_ahead": PLANNED},
    "stage + overlap": {"recompute": "stage", "offload": "overlap"},
    "state optimizer": {"offload_state": "optimizer"},
    "state parameters": {"offload_state": "parameters"},
    "parameters + block + overlap": {"offload_state": "parameters", "recompute": "block", "offload": "overlap"},
}


@dataclass(frozen=True)
class Cell:
    """One run of the engine beside one plain run."""

    subject: str
    schedule: str
    way: str

    @property
    def asked(self) -> StrategySettings:
        """The settings."""
        subject, way = SUBJECTS[self.subject], dict(WAYS[self.way])
        if "offload_ahead" in way:
            way["offload_ahead"] = subject.ahead
        if "recompute_runs" in way:
            way["recompute_runs"] = planned_runs(self.subject)
        return StrategySettings(
            parallel=self.schedule,  # type: ignore[arg-type]
            ranks=RANKS,
            batch=subject.batch,
            microbatches=subject.m,
            device="cpu",
            **way,
        )

    def __str__(self) -> str:
        return f"{self.subject} {self.schedule} {self.way}"


def all_cells() -> Iterator[Cell]:
    """Of the whole table, cheap models first."""
    for name in SUBJECTS:
        for way, settings in WAYS.items():
            for schedule in SCHEDULES:
                if not (schedule == "ddp" and settings.get("recompute") == "stage"):  # ddp has no stages
                    yield Cell(name, schedule, way)


@functools.cache
def planned_runs(name: str) -> str:
    """What is computed again to take half of what blocks save, as ``--recompute-runs`` takes it."""
    subject = SUBJECTS[name]
    graph = Workload(subject.model, ENLARGED * subject.tile, CLASSES).trace()
    memory, whole = StageMemory(graph), Partition(graph, (0,))
    rules: tuple[Recompute, ...] = ("none", "block")
    strategy = Strategy("ddp", RANKS, 1, subject.m)
    mesh, schedule = strategy.mesh, strategy.schedule({})
    stages = [memory.kept(whole, ActivationPolicy(rule)) for rule in rules]
    ends = [rank_bytes(stage, mesh, schedule, slots=1)[0].total for stage in stages]
    runs = chosen_runs(whole, mesh, schedule, equal_cost(graph), sum(ends) / 2, slots=1)
    assert runs, f"nothing to compute again in {name}"
    return ",".join(f"{first}:{last}" for first, last in runs)
