"""Bytes of a pass under fsdp: what layers hold, and the parameters that are whole while they run.

Takes the units that are gathered together, by path of their modules, and the bytes of activations moment by moment. A
unit is whole while layers inside it run, the next one is gathered meanwhile, and its gradients lie there twice until
they are summed; parameters of no unit are whole for the whole pass. After Zhao et al. 2023, PyTorch FSDP, section 4.
No torch here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from parallel.graph.layers import LayerGraph
from parallel.memory.liveness import Ints
from parallel.memory.stage_bytes import Timeline

Units = frozenset[int]


@dataclass(frozen=True)
class Sharding:
    """Modules of a model as fsdp treats them, by path.

    Attributes:
        units: modules of each unit; one may lie in another.
        blocks: modules that are recomputed.
    """

    units: tuple[tuple[str, ...], ...] = ()
    blocks: tuple[str, ...] = ()


WHOLE = Sharding()
"""Of a model without units, which is whole during its passes."""


def gathered_peak(graph: LayerGraph, timeline: Timeline, sharding: Sharding) -> int:
    """Return the bytes at the fullest moment of both passes, without the parts that each rank has for good.

    Args:
        timeline: of all layers, as one stage.
    """
    unit_of = {path: number for number, unit in enumerate(sharding.units) for path in unit}
    chains = [_chain(layer.scope, unit_of) for layer in graph.layers]
    sizes, rest = [0] * len(sharding.units), [0] * len(chains)
    for position, (chain, owned) in enumerate(zip(chains, graph.owned_bytes, strict=True)):
        if chain:
            sizes[chain[-1]] += owned
        else:
            rest[position] = owned
    around = [frozenset(chain) for chain in chains]
    whole = np.array([_bytes(units, sizes) for units in around], dtype=np.int64)
    forward = whole + _ahead(around, sizes)
    again = whole + _ahead(around[::-1], sizes)[::-1]
    made = np.array(list(accumulate(reversed(rest)))[::-1], dtype=np.int64)  # gradients of no unit, until the end
    made[0] *= 2
    moments = timeline.moments
    extra = np.zeros(moments.end, dtype=np.int64)
    extra[moments.recompute_at] = again
    extra[: moments.backward_start] = forward
    extra[moments.backward_at] = again + 2 * whole + made
    return int((timeline.live + extra).max()) + sum(rest)


def _chain(scope: str, unit_of: dict[str, int]) -> list[int]:
    """Return the units around a layer, the innermost last."""
    paths = accumulate(scope.split("."), lambda path, name: f"{path}.{name}")
    return list(dict.fromkeys(unit_of[path] for path in paths if path in unit_of))


def _bytes(units: Iterable[int], sizes: Sequence[int]) -> int:
    return sum(sizes[unit] for unit in units)


def _ahead(around: Sequence[Units], sizes: Sequence[int]) -> Ints:
    """Return by position the bytes of the units that follow those around it."""
    ahead, following, after = [], Units(), Units()
    for here in reversed(around):
        if here != after:
            following, after = after or following, here
        ahead.append(_bytes(following - here, sizes))
    return np.array(ahead[::-1], dtype=np.int64)
