"""A whole model as one stage, to be computed again in parts: for engines that compute all of it on each rank."""

from __future__ import annotations

from torch import nn

from parallel.cut import cut_stage
from parallel.keeping.rule import Keeping
from parallel.keeping.segments import segments_of
from parallel.partition import Partition
from parallel.stage_module import WholeModule
from parallel.trace import trace


def in_segments(module: nn.Module, keeping: Keeping, shape: tuple[int, ...]) -> nn.Module:
    """``module`` run segment by segment, with the names it has; itself where nothing is computed again in parts.

    Args:
        shape: (n, 3, h, w) of a usual microbatch.

    Raises:
        ValueError: the model cannot be traced.
    """
    if not keeping.segmented:
        return module
    traced = trace(module, shape, dtype=next(module.parameters()).dtype)
    partition = Partition(traced.graph, (0,))
    return cut_stage(traced, partition, 0, segments_of(partition, 0, keeping), WholeModule)
