"""Most bytes of activations on a device at a time, kept in four ways, measured and predicted.

Takes models and tile sides; gives a row for each and for none, recompute, offload and both: bytes of all tensors on the
device at most but parameters and the optimizer's state, and growth of the resident memory. One tile, one rank, AdamW.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.out_of_core.problem import GIB, planner
from benchmarks.ranks import run_on_ranks
from parallel.memory.policy import KEEP_ALL, ActivationPolicy
from parallel.plan.plan import PlanRow
from parallel.strategy import Strategy

WAYS = {
    "none": KEEP_ALL,
    "recompute": ActivationPolicy("block"),
    "offload": ActivationPolicy(offload="overlap"),
    "both": ActivationPolicy("block", offload="overlap"),
}
ROOM = 19 * GIB
"""Bytes of this machine that a case may take, on the device and on the host, which are one here."""


def cases(models: list[str], sizes: list[int]) -> Iterator[dict[str, Any]]:
    """Yield cases with their predictions."""
    for model in models:
        for px in sizes:
            for way, policy in WAYS.items():
                made = planner(model, px, 1, 2 * GIB, batch=1)
                candidate = Strategy("single", 1, 1, 1, policy=policy)
                partition = made.stages.partition(candidate, within=False)
                assert partition is not None
                rank = made.stages.rank_bytes(candidate, partition, 0)
                yield {
                    "model": model,
                    "px": px,
                    "way": way,
                    "batch": 1,
                    "row": PlanRow(candidate).to_json(),
                    "state_on_host": False,
                    "predicted": rank.total - rank.parameters - rank.optimizer,
                    "predicted_device": rank.total,
                    "predicted_host": made.stages.host_bytes(candidate, partition),
                }


def measure(case: dict[str, Any]) -> dict[str, Any]:
    """The case and what it took; only what is predicted where this machine has no room for it."""
    if case["predicted_device"] + case["predicted_host"] > ROOM:
        return {**case, "measured": None}
    (found,) = run_on_ranks(1, "benchmarks.out_of_core.trial:run", {**case, "gradients": ""})
    return {**case, "measured": found}
