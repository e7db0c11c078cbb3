"""The largest tile that each strategy trains within a budget of device bytes a rank, one step of it, and its gradients.

Takes a model, a budget and numbers of ranks. A plan says how large a tile may be; the step is then run, its tensors are
counted, and the side goes down by 64 px while they are more than the budget. The gradients are held against those of
the plain step on the same tiles without a limit, where this machine has room for that; and where sums are added in
another order, as by teams, so is the plain step on two threads: a yardstick of what rounding alone does.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.out_of_core.problem import BATCH, ROOM, alone, least, planner
from benchmarks.out_of_core.trial import largest_error
from benchmarks.ranks import run_on_ranks
from parallel.plan.candidates import PLAIN, MemoryOptions
from parallel.plan.largest_tile import STEP, LargestTile, largest_tile

AGAIN = MemoryOptions(("stage", "block"), (False,))
BOTH = MemoryOptions(("block",), (True,))
ROWS = (
    ("plain", "single", PLAIN),
    ("recompute", "single", AGAIN),
    ("recompute + offload", "single", BOTH),
    ("DDP", "ddp", PLAIN),
    ("DDP + recompute", "ddp", AGAIN),
    ("spatial", "spatial", PLAIN),
    ("spatial + recompute", "spatial", AGAIN),
    ("gpipe", "gpipe", PLAIN),
    ("master", "master", PLAIN),
    ("master + recompute", "master", AGAIN),
    ("master + recompute + offload", "master", BOTH),
)
"""Name, strategy, and how it may need less memory."""


ORDER_KEPT = 1e-5
"""Gradients that are nearer to the plain step's than this were summed in its order."""


def rows(model: str, budget: int, worlds: list[int]) -> Iterator[tuple[str, int, LargestTile]]:
    """(name, ranks, what is planned)."""
    for ranks, (name, strategy, savings) in itertools.product(worlds, ROWS):
        if (strategy == "single") == (ranks == 1):
            found = largest_tile(
                strategy, savings, lambda px, one, open_to, ranks=ranks: least(model, px, ranks, budget, one, open_to)
            )
            if found is not None and found.row is not None:
                yield name, ranks, found


def measure(model: str, budget: int, name: str, ranks: int, planned: LargestTile) -> dict[str, Any]:
    """The largest tile that was trained within the budget, and how exact its gradients were."""
    px, row = planned.tile, planned.row
    away = planned.savings.offload == (True,)
    assert row is not None
    with tempfile.TemporaryDirectory() as folder:
        ours = Path(folder) / "ours.pt"
        while True:
            case = {"model": model, "px": px, "batch": BATCH, "row": row.to_json(), "state_on_host": away}
            case["gradients"] = str(ours)
            taken = run_on_ranks(ranks, "benchmarks.out_of_core.trial:run", case)
            if max(one["device_bytes"] for one in taken) <= budget:
                break
            px -= STEP
            found = least(model, px, ranks, budget, row.strategy.name, planned.savings)
            assert found is not None
            row = found
        error, rounding = _errors(model, px, ours, Path(folder))
    return {
        "model": model,
        "name": name,
        "ranks": ranks,
        "planned_px": planned.tile,
        "px": px,
        "strategy": str(row.strategy),
        "predicted": list(row.peak_bytes),
        "device_bytes": [one["device_bytes"] for one in taken],
        "host_bytes": [one["host_bytes"] for one in taken],
        "seconds": max(one["seconds"] for one in taken),
        "gradient_error": error,
        "rounding": rounding,
        "next": _next(model, budget, ranks, planned),
    }


def _errors(model: str, px: int, ours: Path, folder: Path) -> tuple[float | None, float | None]:
    """Return the error of our gradients, and if it is beyond the rounding of one operation, that of the plain step on
    two threads."""
    case, device, _ = alone(model, px, BATCH)
    if device.total > ROOM:
        return None, None
    plain, other_order = folder / "plain.pt", folder / "threads.pt"
    run_on_ranks(1, "benchmarks.out_of_core.trial:run", case | {"gradients": str(plain)})
    error = largest_error(ours, plain)
    if error < ORDER_KEPT:
        return error, None
    run_on_ranks(1, "benchmarks.out_of_core.trial:run", case | {"gradients": str(other_order), "threads": 2})
    return error, largest_error(other_order, plain)


def _next(model: str, budget: int, ranks: int, planned: LargestTile) -> str:
    """Return the limit that twice the side exceeds."""
    if planned.doubled is None:
        return ""
    away = planned.savings.offload == (True,)
    limit = planner(model, 2 * planned.tile, ranks, budget, state_on_host=away).limit(planned.doubled)
    return str(limit)
