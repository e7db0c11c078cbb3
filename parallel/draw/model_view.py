"""What is to be drawn of a model: its graph, how coarse, split where, with which times.

Picture, table, JSON and DOT are each made from one such value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from parallel.draw.coarsen import coarsen
from parallel.draw.outline import Level, Outline
from parallel.draw.stage_sums import CutSum, StageSum, cut_sums, stage_sums
from parallel.graph.layers import LayerGraph
from parallel.graph.partition import Partition


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
        """The partition, or the one of a single stage."""
        return self.partition or Partition(self.graph, (0,))

    @cached_property
    def outline(self) -> Outline:
        """The graph's layers put together into parts."""
        cuts = self.stages.starts
        return coarsen(self.graph, self.level, cuts=cuts, forward_s=self.forward_s, backward_s=self.backward_s)

    @cached_property
    def stage_of(self) -> list[int]:
        """Stage of each part."""
        return [self.stages.stage_of(self.graph.layers[part.start].name) for part in self.outline.parts]

    @cached_property
    def stage_sums(self) -> tuple[StageSum, ...]:
        """What each stage holds."""
        return stage_sums(self.stages, self.forward_s, self.backward_s)

    @cached_property
    def cut_sums(self) -> tuple[CutSum, ...]:
        """What crosses each cut."""
        return cut_sums(self.stages)
