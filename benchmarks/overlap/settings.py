"""Levels of the knobs that overlap something with computation, and the settings and machines that are measured."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple


class Setting(NamedTuple):
    """One level of each knob.

    Attributes:
        every: steps from checkpoint to checkpoint.
        write: how a checkpoint is written, as ``--checkpoint-write``.
        buckets: MiB of gradients summed together during the backward pass; 0: all after it.
        read_ahead: batches in memory, with the one that is computed.
        prefetch: microbatches made on the device before they are asked for.
    """

    every: int
    write: str
    buckets: int
    read_ahead: int
    prefetch: int


LEVELS: dict[str, tuple[Any, ...]] = {
    "every": (20, 5, 1),
    "write": ("blocking", "two-phase"),
    "buckets": (0, 1, 4, 25),
    "read_ahead": (1, 2, 8),
    "prefetch": (0, 1, 2),
}
"""Of each knob; the first overlaps nothing, or asks least."""

OFF = Setting(5, "blocking", 0, 1, 0)
ON: dict[str, Any] = {"write": "two-phase", "buckets": 25, "read_ahead": 8, "prefetch": 1}
"""The level of each knob where it is on among others: the default of ``app.train``, or the least that overlaps."""


def turned_on(*knobs: str, off: Setting = OFF) -> Setting:
    """Return ``off`` with ``knobs`` on."""
    return off._replace(**{knob: ON[knob] for knob in knobs})


def label(setting: Setting) -> str:
    """Return the levels that are not off, as text."""
    parts = [f"checkpoint every {setting.every}"]
    parts += [f"{knob} {getattr(setting, knob)}" for knob in ON if getattr(setting, knob) != LEVELS[knob][0]]
    return ", ".join(parts)


MACHINES = ("busy", "spare-core", "2ms-links", "slow-disk")
"""Two ranks on two cores; one rank, the other core idle; the first with slower messages; the first with files that come
and go as over a slow network."""


SIZES = ((32, 16), (224, 4))
"""Side of a picture in px, and pictures of a step."""


class Case(NamedTuple):
    """A model and pictures.

    Attributes:
        batch: tiles of a step over all ranks, in 4 microbatches.
    """

    model: str
    px: int
    batch: int

    @property
    def name(self) -> str:
        return f"{self.model}@{self.px}"

    @property
    def machines(self) -> tuple[str, ...]:
        """Machines that it is measured on unless others are asked for: large pictures hide links and disks."""
        return MACHINES if self.px == 32 else MACHINES[:2]


CASES = {case.name: case for case in (Case(model, *size) for model in ("resnet18", "resnet50") for size in SIZES)}


@dataclass(frozen=True)
class Window:
    """Some steps that are measured in one go.

    Attributes:
        machine: one of ``MACHINES``.
        parallel: strategy.
    """

    machine: str
    parallel: str
    setting: Setting

    @property
    def steps(self) -> int:
        """Steps from one checkpoint to the next, 5 at least."""
        return max(self.setting.every, 5)


WARM_UP = 1
"""Step before those of a window, in which reading ahead starts from nothing."""


def level_settings(knobs: Sequence[str]) -> list[Setting]:
    """Return each level of each of ``knobs``, with the others off and with the others on.

    Both reading knobs on are added, and with ``write`` every level of ``every``, written both ways.
    """
    settings = [OFF, turned_on(*knobs), turned_on(*({"read_ahead", "prefetch"} & {*knobs}))]
    for start, knob in itertools.product((OFF, turned_on(*knobs)), knobs):
        settings += [start._replace(**{knob: level}) for level in LEVELS[knob]]
    for start, every, write in itertools.product((OFF, turned_on(*knobs)), LEVELS["every"], LEVELS["write"]):
        settings += [start._replace(every=every, write=write)] if "write" in knobs else []
    return list(dict.fromkeys(settings))


EXHAUSTIVE = [Setting(*levels) for levels in itertools.product(*LEVELS.values())]


def windows_of(machines: Collection[str], knobs: Collection[str]) -> Iterator[Window]:
    """Yield what is measured of a case on ``machines`` of ``knobs``, each window once."""
    for machine in machines:
        alone = machine == MACHINES[1]
        # There are no buckets where no gradients are summed.
        used = [knob for knob in ON if knob in knobs and not (alone and knob == "buckets")]
        yield from (Window(machine, "single" if alone else "ddp", setting) for setting in level_settings(used))
    if MACHINES[0] in machines:
        pairs = ((), ("write",), ("read_ahead", "prefetch"), ("write", "read_ahead", "prefetch"))
        yield from (Window(MACHINES[0], "pipedream", turned_on(*pair)) for pair in pairs if {*pair} <= {*knobs})


EXHAUSTIVE_WINDOWS = [Window(MACHINES[0], "ddp", setting) for setting in EXHAUSTIVE]
