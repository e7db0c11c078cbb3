"""What is varied: settings of a run that let parts of it overlap, and which of their combinations are run."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

MOST = 16
"""Combinations that are few enough to run them all."""


@dataclass(frozen=True)
class Knob:
    """A developer setting of ``app.train`` that overlaps something.

    Attributes:
        off: the value with which nothing overlaps; ``on``: one with which something does.
    """

    name: str
    off: str
    on: str


KNOBS = (
    Knob("read-ahead", "1KiB", "1GiB"),
    Knob("read-threads", "1", "2"),
    Knob("device-prefetch", "0", "1"),
    Knob("gradient-buckets", "0", "25MiB"),
    Knob("checkpoint-write", "blocking", "two-phase"),
)
"""A budget of 1 KiB holds one batch: the next is read once it has been computed."""

Setting = tuple[Knob, ...]
"""The knobs that are on, in the order of ``KNOBS``."""


def settings_of(knobs: Sequence[Knob], most: int = MOST) -> list[Setting]:
    """Return what is run, fewest on first: every combination where those are at most ``most``, otherwise nothing on,
    each alone, every two together, and all at once."""
    count = len(knobs)
    sizes = range(count + 1) if 2**count <= most else (0, 1, 2, count)
    return [on for size in sizes for on in itertools.combinations(knobs, size)]


def arguments(knobs: Sequence[Knob], on: Setting) -> list[str]:
    """Return the words for ``app.train`` that put each of ``knobs`` on or off."""
    return [word for knob in knobs for word in ("--developer", f"{knob.name}={knob.on if knob in on else knob.off}")]


def label(on: Setting) -> str:
    return " + ".join(f"{knob.name} {knob.on}" for knob in on) or "nothing on"
