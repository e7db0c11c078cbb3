"""What a plan says where devices differ: what shares by speed gain, and what the slower devices are worth.

Takes the rows of a plan, and a way to plan for some of the devices alone; gives lines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from parallel.plan.plan import PlanRow, best_of
from parallel.schedule.shares import FINE, coarseness

WORTH = 0.03
"""Part of the images per second that devices have to add not to be advised against: less is within a plan's error."""


def unequal_notes(
    devices: Sequence[str],
    speeds: Sequence[float],
    rows: Sequence[PlanRow],
    without: Callable[[str], float | None],
) -> Iterator[str]:
    """Yield the lines.

    Args:
        devices: of the ranks, by name.
        speeds: of the ranks; the slowest device's is 1.
        without: gives the images per second of the best plan for all devices but those of a name; None where there is
            none.
    """
    of_device = dict(zip(devices, speeds, strict=True))
    fastest_first = sorted(of_device.items(), key=lambda item: -item[1])
    yield "speeds: " + ", ".join(f"{devices.count(name)} x {name} {speed:.2f}" for name, speed in fastest_first)
    for name in dict.fromkeys(row.strategy.name for row in rows if row.strategy.shares):
        yield _gain([row for row in rows if row.strategy.name == name])
    best = best_of(rows)
    if best is None or not best.images_per_second:
        return
    for device, speed in of_device.items():
        if speed == max(speeds):
            continue
        others = without(device)
        if others is None:
            continue
        gain = best.images_per_second / others - 1
        what = f"{devices.count(device)} x {device}"
        if gain < WORTH:
            yield f"without {what}: {others:.3g} images/s, as many or more: leave them out"
        else:
            yield f"without {what}: {others:.3g} images/s; they add {gain:.0%}"


def _gain(rows: Sequence[PlanRow]) -> str:
    """What shares by speed gain a strategy."""
    shared = best_of(row for row in rows if row.strategy.shares)
    equal = best_of(row for row in rows if not row.strategy.shares)
    if shared is None or equal is None or not shared.images_per_second or not equal.images_per_second:
        return f"{rows[0].strategy.name}: no shares by speed fit"
    strategy = shared.strategy
    counts = ",".join(str(len(share)) for share in strategy.shares)
    gain = shared.images_per_second / equal.images_per_second
    coarse = ""
    if strategy.m < FINE * strategy.groups:
        coarse = f"; {strategy.m} microbatches follow speeds within {coarseness(strategy.m, strategy.groups):.0%}"
    return (
        f"{strategy.name} --shares {counts}: {shared.images_per_second:.3g} images/s, {gain:.2f} times its best with "
        f"equal shares{coarse}"
    )
