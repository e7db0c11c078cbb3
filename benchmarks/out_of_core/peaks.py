"""Most bytes of activations on a device at a time, kept in four ways, measured and predicted.

Takes models and tile sides; gives a row for each and for none, recompute, offload and both: bytes of all tensors on the
device at most but parameters and the optimizer's state, and growth of the resident memory. One tile, one rank, AdamW.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from benchmarks.out_of_core.problem import ROOM, alone
from benchmarks.ranks import run_on_ranks
from parallel.memory.policy import KEEP_ALL, ActivationPolicy

WAYS = {
    "none": KEEP_ALL,
    "recompute": ActivationPolicy("block"),
    "offload": ActivationPolicy(offload="overlap"),
    "both": ActivationPolicy("block", offload="overlap"),
}


def rows(models: list[str], sizes: list[int]) -> Iterator[dict[str, Any]]:
    """Yield what is predicted of each case, and what it took where this machine has room for it."""
    for model, px, (way, policy) in itertools.product(models, sizes, WAYS.items()):
        case, device, host_bytes = alone(model, px, 1, policy)
        fits = device.total + host_bytes <= ROOM
        yield {
            **case,
            "way": way,
            "predicted": device.total - device.parameters - device.optimizer,
            "predicted_host": host_bytes,
            "measured": run_on_ranks(1, "benchmarks.out_of_core.trial:run", case)[0] if fits else None,
        }
