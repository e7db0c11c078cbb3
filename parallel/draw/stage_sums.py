"""From a partition to what its stages hold and what crosses its cuts: sums for tables and pictures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from parallel.draw.outline import saved_bytes, seconds_of
from parallel.graph.partition import Partition
from parallel.graph.single_value_cuts import values_across


@dataclass(frozen=True, slots=True)
class StageSum:
    """Layers ``start`` to ``stop`` (not included); fields as those of ``Part``."""

    stage: int
    start: int
    stop: int
    flops: int
    param_bytes: int
    saved_bytes: int
    forward_s: float | None
    backward_s: float | None

    @property
    def seconds(self) -> float | None:
        """Forward and backward; None where neither is known."""
        known = [seconds for seconds in (self.forward_s, self.backward_s) if seconds is not None]
        return sum(known) if known else None


@dataclass(frozen=True, slots=True)
class CutSum:
    """What crosses the cut before ``graph.layers[position]``: the values, and their bytes for the traced shapes."""

    position: int
    values: tuple[str, ...]
    bytes: int


def stage_sums(
    partition: Partition, forward_s: Sequence[float] | None = None, backward_s: Sequence[float] | None = None
) -> tuple[StageSum, ...]:
    """Of every stage, in order; ``forward_s`` and ``backward_s`` are seconds of each layer."""
    ends = (*partition.starts[1:], len(partition.graph.layers))
    return tuple(
        StageSum(
            stage=stage,
            start=start,
            stop=stop,
            flops=sum(layer.flops for layer in partition.layers_of(stage)),
            param_bytes=sum(layer.param_bytes for layer in partition.layers_of(stage)),
            saved_bytes=saved_bytes(partition.graph, range(start, stop)),
            forward_s=seconds_of(forward_s, start, stop),
            backward_s=seconds_of(backward_s, start, stop),
        )
        for stage, (start, stop) in enumerate(zip(partition.starts, ends, strict=True))
    )


def cut_sums(partition: Partition) -> tuple[CutSum, ...]:
    """Of every cut, in order. A value that several later stages use crosses each of the cuts before them."""
    graph = partition.graph
    cuts = []
    for position in partition.starts[1:]:
        values = values_across(graph, position)
        cuts.append(CutSum(position, values, sum(graph.by_name[name].output_bytes for name in values)))
    return tuple(cuts)
