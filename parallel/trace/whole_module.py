"""A whole model as one stage, computed layer by layer: for engines that compute all of it on each rank.

So it can be computed again in parts. And what leaves for the host really leaves: the user's own forward pass holds what
it gave to a module for as long as that runs, a traced one lets go of a value once no layer needs it any more.
"""

from __future__ import annotations

from torch import nn

from parallel.comm.communicator import Communicator
from parallel.graph.partition import Partition
from parallel.memory.policy import ActivationPolicy
from parallel.memory.segments import segments_of
from parallel.trace.cut import cut_stage
from parallel.trace.stage_module import WholeModule
from parallel.trace.trace_alone import trace_alone


def in_segments(
    module: nn.Module, keeping: ActivationPolicy, shape: tuple[int, ...], communicator: Communicator
) -> nn.Module:
    """Return ``module`` run segment by segment, with the names it has; itself where everything is kept on the device,
    and where nothing is computed again and it cannot be traced.

    Args:
        shape: (n, 3, h, w) of a usual microbatch.
        communicator: all ranks; each calls it.

    Raises:
        ValueError: the model cannot be traced, and parts of it are to be computed again.
    """
    if not keeping.segmented and keeping.offload == "none":
        return module
    try:
        traced = trace_alone(module, shape, communicator)
    except ValueError:
        if keeping.segmented:
            raise
        return module
    partition = Partition(traced.graph, (0,))
    return cut_stage(traced, partition, 0, segments_of(partition, 0, keeping), WholeModule)
