"""A model as it is drawn or listed: its graph by parts, its stages, its times, and sums over the stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from parallel.draw.outline import Level, Outline, coarsen, saved_bytes, seconds_of
from parallel.graph.layers import LayerGraph
from parallel.graph.partition import Partition, values_across


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
        """Return the seconds forward and backward; None where neither is known."""
        known = [seconds for seconds in (self.forward_s, self.backward_s) if seconds is not None]
        return sum(known) if known else None


@dataclass(frozen=True, slots=True)
class CutSum:
    """Values across the cut before ``graph.layers[position]``, and their bytes for the traced shapes."""

    position: int
    values: tuple[str, ...]
    bytes: int


@dataclass(frozen=True)
class ModelView:
    """A model as it is to be shown.

    Args:
        level: as of ``coarsen``.
        partition: whose stages and cuts are shown; parts are split where a cut falls inside. None: one stage, no cut.
        forward_s: seconds of each layer; ``backward_s`` likewise.
        title: above the drawing.

    Raises:
        ValueError: by ``outline``, as ``coarsen``.
    """

    graph: LayerGraph
    level: Level = "block"
    partition: Partition | None = None
    forward_s: Sequence[float] | None = None
    backward_s: Sequence[float] | None = None
    title: str = ""

    @property
    def stages(self) -> Partition:
        """Return the partition, or that of a single stage."""
        return self.partition or Partition(self.graph, (0,))

    @cached_property
    def outline(self) -> Outline:
        """Return the graph's layers put together into parts."""
        cuts = self.stages.starts
        return coarsen(self.graph, self.level, cuts=cuts, forward_s=self.forward_s, backward_s=self.backward_s)

    @cached_property
    def stage_of(self) -> list[int]:
        """Return the stage of each part."""
        return [self.stages.stage_of(self.graph.layers[part.start].name) for part in self.outline.parts]

    @cached_property
    def stage_sums(self) -> tuple[StageSum, ...]:
        """Return the sums over each stage."""
        starts = self.stages.starts
        ends = (*starts[1:], len(self.graph.layers))
        return tuple(map(self._stage_sum, range(len(starts)), starts, ends))

    def _stage_sum(self, stage: int, start: int, stop: int) -> StageSum:
        layers = self.graph.layers[start:stop]
        return StageSum(
            stage=stage,
            start=start,
            stop=stop,
            flops=sum(layer.flops for layer in layers),
            param_bytes=sum(layer.param_bytes for layer in layers),
            saved_bytes=saved_bytes(self.graph, range(start, stop)),
            forward_s=seconds_of(self.forward_s, start, stop),
            backward_s=seconds_of(self.backward_s, start, stop),
        )

    @cached_property
    def cut_sums(self) -> tuple[CutSum, ...]:
        """Return the values across each cut; one that several later stages use crosses each cut before them."""
        crossing = [(position, values_across(self.graph, position)) for position in self.stages.starts[1:]]
        sizes = self.graph.by_name
        return tuple(CutSum(at, values, sum(sizes[name].output_bytes for name in values)) for at, values in crossing)
