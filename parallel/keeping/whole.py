"""A whole model as one stage, to be computed again in parts: for engines that compute all of it on each rank."""

from __future__ import annotations

from torch import nn

from parallel.comm.communicator import Communicator
from parallel.cut import cut_stage
from parallel.keeping.rule import Keeping
from parallel.keeping.segments import segments_of
from parallel.partition import Partition
from parallel.stage_module import WholeModule
from parallel.trace_alone import trace_alone


def in_segments(module: nn.Module, keeping: Keeping, shape: tuple[int, ...], communicator: Communicator) -> nn.Module:
    """``module`` run segment by segment, with the names it has; itself where nothing is computed again in parts.

    Args:
        shape: (n, 3, h, w) of a usual microbatch.
        communicator: all ranks; each calls it.

    Raises:
        ValueError: the model cannot be traced.
    """
    if not keeping.segmented:
        return module
    traced = trace_alone(module, shape, communicator)
    partition = Partition(traced.graph, (0,))
    return cut_stage(traced, partition, 0, segments_of(partition, 0, keeping), WholeModule)
