"""Tracing on ranks that may be threads of one process.

Symbolic tracing replaces ``nn.Module.__call__`` for the whole process while it runs, and watches its generators: no
rank draws weights before, or computes after, while another traces.
"""

from __future__ import annotations

import threading

from torch import nn

from parallel.comm.communicator import Communicator
from parallel.trace import Traced, trace

_TRACING = threading.Lock()


def trace_alone(module: nn.Module, shape: tuple[int, ...], communicator: Communicator) -> Traced:
    """What ``trace`` gives for ``module`` in its own type; every rank calls it.

    Args:
        shape: (n, 3, h, w) of a usual microbatch.

    Raises:
        ValueError: the model cannot be traced.
    """
    communicator.barrier()
    with _TRACING:
        traced = trace(module, shape, dtype=next(module.parameters()).dtype)
    communicator.barrier()
    return traced
