"""The cells of the table: which model runs under which schedule, on how many ranks, over which communicator.

Takes nothing; gives cells as plain values. Letters: D stages, d groups of D ranks, m microbatches.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

from parallel.schedule.registry import SCHEDULES
from parallel.strategy import Strategy

CommunicatorName = Literal["threads", "gloo", "mpi"]
COMMUNICATORS: tuple[CommunicatorName, ...] = get_args(CommunicatorName)
MESHES = ((1, 2), (1, 3), (1, 4), (2, 2))
"""(d, D)."""
STEPS, MANY_STEPS = 2, 20


@dataclass(frozen=True)
class Subject:
    """A model of the table.

    Attributes:
        model: as for ``--model``.
        tile: px; the smallest that leaves batch norm several values a channel.
        tiles: of a microbatch.
        uneven: the first microbatch has one tile more.
    """

    name: str
    model: str
    tile: int
    tiles: int = 1
    uneven: bool = False

    def sizes(self, m: int) -> tuple[int, ...]:
        """Tiles of each microbatch."""
        return (self.tiles + self.uneven, *[self.tiles] * (m - 1))


OWN = "benchmarks.exactness.models"
SMALL = (
    Subject("dropout", f"{OWN}:Dropouts", 12, uneven=True),
    Subject("two-outputs", f"{OWN}:TwoOutputs", 12, uneven=True),
)
SUBJECTS = {
    subject.name: subject
    for subject in (
        *SMALL,
        Subject("unet_w8", "unet_w8", 32),
        Subject("resnet18", "resnet18", 64),
        Subject("resnet110_v2", "resnet110_v2", 16),
        # One tile leaves channels that a 3 x 3 pool over 2 x 2 px makes constant: they stand on the kink of a ReLU,
        # where the last bit of a sum decides about a gradient.
        Subject("googlenet", f"{OWN}:googlenet", 64, tiles=2),
        Subject("unet(5,16)", "unet(5,16)", 64),
        Subject("densenet121", "torchvision:densenet121", 64),
    )
}


@dataclass(frozen=True)
class Cell:
    """One run of the engine beside one plain run."""

    subject: str
    schedule: str
    groups: int
    depth: int
    communicator: CommunicatorName
    dtype: Literal["float64", "float32"] = "float64"
    steps: int = STEPS

    @property
    def ranks(self) -> int:
        return self.groups * self.depth

    @property
    def m(self) -> int:
        """One more than the stages, so that schedules fill and drain; one fewer than even with two groups."""
        if self.schedule == "mast":
            return 2 * self.groups
        return self.groups * (self.depth + 1) - (self.groups - 1)

    @property
    def strategy(self) -> Strategy:
        chunks = 2 if SCHEDULES[self.schedule].chunks else 1
        return Strategy(self.schedule, self.ranks, self.depth, self.m, chunks=chunks)

    def __str__(self) -> str:
        mesh = f"{self.groups}x{self.depth}"
        return f"{self.subject} {self.schedule} {mesh} {self.communicator} {self.dtype} {self.steps}-steps"


def all_cells() -> Iterator[Cell]:
    """Of the whole table; those that share ranks and communicator follow each other, cheap models first."""
    for communicator in COMMUNICATORS:
        for world in sorted({groups * depth for groups, depth in MESHES}):
            yield from _cells(communicator, [(d, D) for d, D in MESHES if d * D == world])


def _cells(communicator: CommunicatorName, meshes: list[tuple[int, int]]) -> Iterator[Cell]:
    for name, subject in SUBJECTS.items():
        for groups, depth in meshes:
            for schedule in SCHEDULES:
                yield Cell(name, schedule, groups, depth, communicator)
                if subject in SMALL:
                    yield Cell(name, schedule, groups, depth, communicator, "float32")
                    if (groups, depth) == (1, 3):
                        yield Cell(name, schedule, groups, depth, communicator, steps=MANY_STEPS)
