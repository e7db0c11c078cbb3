"""Policy for saved activations, as a user or a planner chooses it: keep, recompute or offload. No torch here.

Takes a partition; gives ``Segment``s that cover the stage's layers without gaps. A segment begins where a stage could.
What is computed last in the last stage is kept: its backward pass follows immediately.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple

from parallel import remembered
from parallel.graph.blocks import block_cuts
from parallel.graph.layers import LayerGraph
from parallel.graph.partition import Partition

Offload = Literal["none", "overlap"]
Recompute = Literal["none", "stage", "block", "optimal"]

MIB = 1 << 20
SMALLEST = MIB
"""Bytes below which a tensor is left on the device: moving it takes longer than it is worth."""
WINDOW = 2
"""Largest storages that the window of offloading holds on a GPU: one is copied while the next is computed."""
STEPS = 8
"""Sizes of host buffers between one power of two and the next; a ninth is wasted at most."""
LEAST = 4096
"""Bytes of the smallest host buffer, a page."""


def buffer_bytes(size: int) -> int:
    """Return the bytes of the host buffer that ``size`` bytes are moved to."""
    step = max(LEAST, (1 << max(0, size.bit_length() - 1)) // STEPS)
    return -(-size // step) * step


class Segment(NamedTuple):
    """Layers at positions ``start`` to ``stop``, not included, of the model's graph.

    Attributes:
        recompute: only what enters them is kept; they are recomputed before their backward pass.
    """

    start: int
    stop: int
    recompute: bool


@dataclass(frozen=True)
class ActivationPolicy:
    """Policy for what the forward passes of a rank save.

    Attributes:
        recompute: "none"; "stage": nothing is kept but what enters a stage; "block": what enters a block of the model
            (``blocks``), or with ``chosen`` those runs; "optimal": what enters the runs of ``chosen``, which a planner
            finds.
        chosen: names of the first and last layer of each run of layers that is recomputed.
        offload: what is kept is moved to the host.
        ahead: bytes of activations that offloading leaves on the device, or brings back ahead of their use; of all
            stages of a rank together. None: ``WINDOW`` times the largest storage that the rank has saved.
        smallest: bytes of a tensor that is worth moving.
        optimizer: its state and its step are on the host.
        parameters: they are, too, and come to the device layer by layer; implies ``optimizer``.
        stream: side in px of the boxes that a tile is computed in, one after the other; None: the whole tile.
        host_bytes: that a rank may take on the host; what does not fit there stays on the device. None: no limit.
        map_bytes: of maps between boxes that a rank leaves on its GPU; others are moved to the host. None: not decided.
    """

    recompute: Recompute = "none"
    chosen: tuple[tuple[str, str], ...] = ()
    offload: Offload = "none"
    ahead: int | None = 0
    smallest: int = SMALLEST
    host_bytes: int | None = None
    map_bytes: int | None = None
    optimizer: bool = False
    parameters: bool = False
    stream: int | None = None

    def __post_init__(self) -> None:
        assert self.recompute in ("block", "optimal") or not self.chosen, self.chosen

    @property
    def stagewise(self) -> bool:
        """Return whether whole stages are recomputed, which their schedule shows."""
        return self.recompute == "stage"

    @property
    def segmented(self) -> bool:
        """Return whether parts of a stage are recomputed within its backward pass."""
        return bool(self.chosen) if self.recompute == "optimal" else self.recompute not in ("none", "stage")

    @property
    def moves(self) -> bool:
        """Return whether saved activations are offloaded to the host."""
        return self.offload != "none"

    @property
    def saves(self) -> bool:
        """Return whether time is spent to save fewer bytes."""
        return self.recompute != "none" or self.moves

    @property
    def state(self) -> Literal["none", "optimizer", "parameters"]:
        """Return the model state that is on the host, as ``--offload-state`` names it."""
        return "parameters" if self.parameters else "optimizer" if self.optimizer else "none"


KEEP_ALL = ActivationPolicy()
"""On the device, all of it."""

NO_BLOCKS = "fsdp recomputes modules of several layers, and this model has none"
"""Why a model cannot be recomputed under fsdp."""


def segments_of(partition: Partition, stage: int, policy: ActivationPolicy) -> tuple[Segment, ...]:
    """Return the segments of a stage, in order; a single one that is kept where nothing is recomputed.

    Raises:
        ValueError: a chosen run of layers that is not in the model, or begins or ends where no cut may fall.
    """
    graph, start = partition.graph, partition.starts[stage]
    stop = (*partition.starts, len(graph.layers))[stage + 1]
    if not policy.segmented:
        return (Segment(start, stop, False),)
    if policy.recompute == "block" and not policy.chosen:
        places = block_cuts(graph)
        inside = places[bisect.bisect_right(places, start) : bisect.bisect_left(places, stop)]
        bounds = list(pairwise([start, *inside, stop]))
        last = stage == partition.depth - 1
        return tuple(Segment(*bound, recompute=not (last and bound == bounds[-1])) for bound in bounds)
    segments, at = [], start
    for run in (*_runs(graph, policy.chosen), (stop, stop)):
        first, after = (min(max(at, place), stop) for place in run)
        segments += [Segment(at, first, False)] * (at < first) + [Segment(first, after, True)] * (first < after)
        at = after
    return tuple(segments)


@remembered
def _runs(graph: LayerGraph, chosen: tuple[tuple[str, str], ...]) -> tuple[tuple[int, int], ...]:
    """Return (first position, position after the last) of each, in order."""
    runs = []
    for first, last in chosen:
        for name in (first, last):
            if name not in graph.position:
                raise ValueError(f"{name!r} is to be recomputed and is no layer of the model: plan anew")
        run = (graph.position[first], graph.position[last] + 1)
        if run[0] >= run[1] or not _can_stand_alone(graph, *run):
            raise ValueError(f"{first!r} to {last!r} cannot be recomputed alone: no cut may fall there; plan anew")
        runs.append(run)
    return tuple(sorted(runs))


def _can_stand_alone(graph: LayerGraph, start: int, stop: int) -> bool:
    """Return whether the layers from ``start`` to ``stop``, not included, can be recomputed without others."""
    count = len(graph.layers)
    return all(at in (0, count) or (2 <= at < count - 1 and graph.can_cut(at)) for at in (start, stop))


def module_runs(graph: LayerGraph, modules: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Return the runs of layers, as in ``chosen``, that are recomputed with ``modules``, given by path.

    Layers that the trace does not show within a module, or that cannot be cut from others, are left out: they count as
    kept.
    """
    known = set(modules)
    owners: list[str | None] = []
    for layer in graph.layers:
        path = layer.scope.split(".")
        owners.append(next((at for n in range(len(path)) if (at := ".".join(path[: n + 1])) in known), None))
    runs, start = [], 0
    for owner, group in itertools.groupby(owners):
        stop = start + len(list(group))
        # The model's input and output keep nothing, and are never alone.
        bounds = start - (start == 1), stop + (stop == len(owners) - 1)
        if owner is not None and _can_stand_alone(graph, *bounds):
            runs.append((graph.layers[bounds[0]].name, graph.layers[bounds[1] - 1].name))
        start = stop
    return tuple(runs)
