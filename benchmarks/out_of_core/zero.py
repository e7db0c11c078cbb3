"""ZeRO within a budget: the largest tile of ResNet-50 and the widest U-Net that ranks train, as planned.

    python -m benchmarks.out_of_core.zero [--ranks 4] [--budget 2GiB] [--run NAME ...] [--write]

Rows are named as the table has them, such as "zero 2", "fsdp, recompute" or "ddp, host". A step of those after
``--run`` is trained on real ranks at the planned side, and its tensors are counted.
"""

from __future__ import annotations

import functools
from typing import Any

from app.settings.fields import bytes_of
from benchmarks.out_of_core.problem import planner
from benchmarks.ranks import run_on_ranks
from benchmarks.results import markdown_table, parser_of, publish, results
from parallel.plan.candidates import MemoryOptions
from parallel.plan.largest_tile import LargestTile, largest_tile
from parallel.plan.plan import PlanRow
from parallel.plan.search import Planner

MIB = 1 << 20
NETWORK, UNET_PX = "resnet50", 256
BATCH = 8
"""Tiles of a step, each a microbatch of its own."""
NARROWEST, WIDEST, STEP = 16, 512, 8
"""Channels at full resolution of the U-Nets that are tried."""
ROWS = {
    f"{way}{', recompute' * again}{', host' * host}": (name, zero, "block" if again else "none", host)
    for host in (False, True)
    for again in (False, True)
    for way, name, zero in (("ddp", "ddp", 0), ("zero 1", "ddp", 1), ("zero 2", "ddp", 2), ("fsdp", "fsdp", 0))
}
"""Name -> strategy, stage of ZeRO, what is recomputed, whether the optimizer and its state are on the host."""


@functools.cache
def _planner(model: str, px: int, ranks: int, budget: int, host: bool) -> Planner:
    return planner(model, px, ranks, budget, BATCH, state_on_host=host)


def _least(model: str, px: int, ranks: int, budget: int, row: str) -> PlanRow | None:
    """Return the candidate of ``row`` with microbatches of one tile."""
    name, zero, recompute, host = ROWS[row]
    savings = MemoryOptions((recompute,), (False,), stream=False, zero=(zero,))
    (found,) = _planner(model, px, ranks, budget, host).search([name], ranks=ranks, m=BATCH, savings=savings)
    return None if found.refused else found


def tile_of(row: str, ranks: int, budget: int) -> LargestTile | None:
    """Return the largest tile of ResNet-50."""
    return largest_tile(ROWS[row][0], MemoryOptions(), lambda px, _name, _open: _least(NETWORK, px, ranks, budget, row))


def width_of(row: str, ranks: int, budget: int) -> tuple[int, int]:
    """Return the channels of the widest U-Net, and the bytes of its parameters."""
    low, high = NARROWEST, WIDEST
    while high - low > STEP:
        middle = (low + high) // 2 // STEP * STEP
        found = _least(f"unet_w{middle}", UNET_PX, ranks, budget, row)
        low, high = (middle, high) if found is not None and found.fits else (low, middle)
    return low, sum(_planner(f"unet_w{low}", UNET_PX, ranks, budget, ROWS[row][3]).task.graph.owned_bytes)


def measure(row: str, found: LargestTile, ranks: int) -> int:
    """Return the most bytes of tensors that a rank had at a time, in a step of the planned side."""
    assert found.row is not None
    case: dict[str, Any] = {"model": NETWORK, "px": found.tile, "batch": BATCH, "row": found.row.to_json()}
    taken = run_on_ranks(ranks, "benchmarks.out_of_core.trial:run", case | {"state_on_host": ROWS[row][3]})
    return max(int(one["device_bytes"]) for one in taken)


def _line(row: str, ranks: int, budget: int, run: bool) -> tuple[str, ...]:
    found, (width, parameters) = tile_of(row, ranks, budget), width_of(row, ranks, budget)
    unet = str(width), f"{parameters / MIB:.0f}"
    if found is None or found.row is None:
        return row, "none", "", "", "", *unet
    planned = max(found.row.peak_bytes)
    taken = measure(row, found, ranks) if run else None
    trained = ("", "") if taken is None else (f"{taken / MIB:.0f}", f"{planned / taken - 1:+.1%}")
    return row, f"{found.tile:,}", f"{planned / MIB:.0f}", *trained, *unet


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--ranks", type=int, default=4, choices=(2, 4))
    parser.add_argument("--budget", default="2GiB", help="device bytes of each rank")
    parser.add_argument("--run", nargs="+", default=[], choices=list(ROWS), metavar="NAME", help="rows to train")
    asked = parser.parse_args()
    budget = bytes_of(asked.budget)
    if budget is None:
        parser.error(f"--budget takes a size such as 2GiB; got {asked.budget!r}")
    lines = []
    for row in ROWS:
        lines.append(_line(row, asked.ranks, budget, row in asked.run))
        print(*lines[-1], flush=True)
    header = ("way", "tile, px", "planned, MiB", "trained, MiB", "error", "U-Net, channels", "parameters, MiB")
    trained = "".join(f' "{row}"' for row in asked.run)
    command = f"python -m benchmarks.out_of_core.zero{' --run' * bool(trained)}{trained} --write"
    publish(__file__, results(command, markdown_table(header, lines)), asked.write, "zero")


if __name__ == "__main__":
    main()
