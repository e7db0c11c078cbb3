"""Most bytes of activations on a device at a time, kept in four ways, beside what is predicted.

Takes models and tile sides; gives a row for each and for none, recompute, offload and both: bytes of all tensors on the
device at most but parameters and the optimizer's state, and growth of the resident memory. One tile, one rank, AdamW.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.out_of_core.problem import GIB, planner, settings_of
from benchmarks.ranks import run_on_ranks
from parallel.plan.candidate import Candidate
from parallel.plan.plan import PlanRow

WAYS = {
    "none": {},
    "recompute": {"recompute": "block"},
    "offload": {"offload": True},
    "both": {"recompute": "block", "offload": True},
}
ROOM = 19 * GIB
"""Bytes of this machine that a case may take, on the device and on the host, which are one here."""


def cases(models: list[str], sizes: list[int]) -> Iterator[dict[str, Any]]:
    """With what is predicted for each."""
    for model in models:
        for px in sizes:
            for way, keeps in WAYS.items():
                made = planner(model, px, 1, 2 * GIB, batch=1)
                candidate = Candidate("single", 1, 1, 1, **keeps)  # type: ignore[arg-type]
                partition = made.cutting.partition(candidate, within=False)
                assert partition is not None
                keeping = made.cutting.keeping(candidate, partition)
                rank = made.cutting.rank_bytes(candidate, partition, keeping, 0)
                yield {
                    "model": model,
                    "px": px,
                    "way": way,
                    "settings": settings_of(PlanRow(candidate), 1, batch=1),
                    "predicted": rank.total - rank.parameters - rank.optimizer,
                    "predicted_device": rank.total,
                    "predicted_host": made.cutting.host_bytes(candidate, partition, keeping),
                }


def measure(case: dict[str, Any]) -> dict[str, Any]:
    """The case and what it took; only what is predicted where this machine has no room for it."""
    if case["predicted_device"] + case["predicted_host"] > ROOM:
        return {**case, "measured": None}
    (found,) = run_on_ranks(1, "benchmarks.out_of_core.trial:run", {**case, "gradients": ""})
    return {**case, "measured": found}
