"""Segments of a stage under a policy: consecutive layers that are recomputed together.

Takes a partition; gives ``Segment``s that cover the stage's layers without gaps. A segment begins where a stage could.
What is computed last in the last stage is kept: its backward pass follows at once. No torch here.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from itertools import pairwise

from parallel.graph.blocks import block_cuts
from parallel.graph.layers import LayerGraph
from parallel.graph.partition import Partition
from parallel.memory.policy import ActivationPolicy, Segment


def segments_of(partition: Partition, stage: int, policy: ActivationPolicy) -> tuple[Segment, ...]:
    """Return the segments of a stage, in order; a single one that is kept where nothing is recomputed.

    Raises:
        ValueError: a chosen run of layers that is not in the model, or begins or ends where no cut may fall.
    """
    graph = partition.graph
    start = partition.starts[stage]
    stop = partition.starts[stage + 1] if stage + 1 < partition.depth else len(graph.layers)
    if not policy.segmented:
        return (Segment(start, stop, False),)
    if policy.recompute == "optimal":
        return _of_runs(start, stop, _runs(graph, policy.chosen))
    places = [place for place in block_cuts(graph) if start < place < stop]
    bounds = list(pairwise([start, *places, stop]))
    last = stage == partition.depth - 1
    return tuple(Segment(*bound, recompute=not (last and bound == bounds[-1])) for bound in bounds)


def _runs(graph: LayerGraph, chosen: tuple[tuple[str, str], ...]) -> list[tuple[int, int]]:
    """Return (first position, position after the last) of each."""
    runs: list[tuple[int, int]]
    if (known := graph.remembered.get("runs")) is not None and known[0] is chosen:
        runs = known[1]
        return runs
    count, runs = len(graph.layers), []
    for first, last in chosen:
        if first not in graph.position or last not in graph.position:
            faults = [name for name in (first, last) if name not in graph.position]
            raise ValueError(f"{faults[0]!r} is to be computed again and is no layer of the model: plan anew")
        run = (graph.position[first], graph.position[last] + 1)
        if run[0] >= run[1] or not all(at in (0, count) or (2 <= at < count - 1 and graph.can_cut(at)) for at in run):
            raise ValueError(f"{first!r} to {last!r} cannot be computed again alone: no cut may fall there; plan anew")
        runs.append(run)
    runs.sort()
    graph.remembered["runs"] = chosen, runs  # the stages of a partition ask one after the other
    return runs


def _of_runs(start: int, stop: int, runs: Sequence[tuple[int, int]]) -> tuple[Segment, ...]:
    """Return the runs within a stage, and what is kept between them. ``runs`` are in order."""
    segments, at = [], start
    for first, after in itertools.islice(runs, max(0, bisect.bisect(runs, (start, start)) - 1), None):
        if first >= stop:
            break
        first, after = max(first, start), min(after, stop)
        if first >= after:
            continue
        if at < first:
            segments.append(Segment(at, first, False))
        segments.append(Segment(first, after, True))
        at = after
    if at < stop:
        segments.append(Segment(at, stop, False))
    return tuple(segments)
