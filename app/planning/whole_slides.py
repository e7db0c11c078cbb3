"""Plans for ``--tile slide``, whose tiles differ in size: the largest slide has to fit.

Takes the settings and the largest slide; gives settings that a planner takes, with a square of as many px as a tile,
and says what to do where such a tile does not fit.
"""

from __future__ import annotations

import dataclasses
import math

from app.planning.auto import machine_of
from app.settings.cli import RunError
from app.settings.run import RunConfig
from parallel.plan.candidates import MemoryOptions
from parallel.plan.search import Planner
from parallel.units import bytes_text
from pipelines.tiles.index_settings import WHOLE_SLIDE_MULTIPLE

BOX_PX = 512
"""Named in advice."""


def as_square(config: RunConfig, largest: tuple[int, int]) -> RunConfig:
    """Return ``config`` with tiles of one size that take what the largest slide does.

    Args:
        largest: width and height in px.
    """
    multiple = config.index.stride or WHOLE_SLIDE_MULTIPLE
    side = multiple * math.ceil(math.sqrt(largest[0] * largest[1]) / multiple)
    return dataclasses.replace(config, index=dataclasses.replace(config.index, tile=side, stride=None))


def in_boxes(largest: tuple[int, int]) -> str:
    """Return what to do about slides that are too large to be computed at once."""
    return (
        f"the largest slide has {largest[0]} x {largest[1]} px: compute slides in boxes, with --parallel single or ddp "
        f"and --stream {BOX_PX}, or ask for a coarser --mpp"
    )


def check_largest(config: RunConfig, largest: tuple[int, int], classes: int, segments: bool) -> None:
    """Refuse slides that a strategy which is named, without boxes, cannot compute.

    Raises:
        RunError: the largest takes more than there is, by plan.
    """
    from app.planning.workload import Workload  # torch is imported once the settings are known to be right

    square, asked = as_square(config, largest), config.strategy
    if asked.stream_px is not None:
        return
    machine = machine_of(config, timed=False)
    work = Workload(
        config.net.model,
        square.index.side,
        classes,
        config.net.norm,
        segments,
        config.optimization.optimizer,
        machine.autocast,
        config.net.head,
        config.optimization.ema > 0,
    )
    try:
        planner = Planner(work.task(asked.batch, machine.estimate), machine.cluster)
    except ValueError:  # not traced: nobody knows
        return
    savings = MemoryOptions((asked.recompute,), (asked.offload != "none",), stream=False)
    rows = planner.search([asked.name], ranks=asked.world, m=asked.m, savings=savings)
    least = min((max(row.peak_bytes) for row in rows if row.peak_bytes), default=0)
    if least > machine.cluster.memory_bytes:
        raise RunError(
            f"--tile slide takes {bytes_text(least)} a rank, of {bytes_text(machine.cluster.memory_bytes)}; "
            + in_boxes(largest)
        )
