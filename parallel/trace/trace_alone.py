"""Tracing on ranks that may be threads of one process.

Symbolic tracing replaces ``nn.Module.__call__`` for the whole process while it runs, and watches its generators: no
rank draws weights before, or computes after, while another traces.
"""

from __future__ import annotations

import torch
from torch import nn

from parallel.comm.communicator import Communicator
from parallel.trace.left_as_it_was import left_as_it_was
from parallel.trace.taken_over import taken_over
from parallel.trace.trace import Traced, trace
from parallel.trace.traced_check import first_difference
from parallel.trace.updated_faults import refuse_checkpointed
from parallel.trace.updated_search import Updated, checkpointed_norm, updated_buffers
from parallel.trace.without_data import ONE_AT_A_TIME

_TRACED: list[tuple[Traced, tuple[int, ...]]] = []
"""Of ranks that are in ``trace_alone`` now, and so have not begun to change their models."""


def trace_alone(module: nn.Module, shape: tuple[int, ...], communicator: Communicator) -> Traced:
    """Return what ``trace_as_it_runs`` gives for ``module`` in its own type; every rank calls it. The first thread of a
    process traces, and others that have the same model take copies.

    Args:
        shape: (n, 3, h, w) of a usual microbatch.

    Raises:
        ValueError: the model cannot be traced.
    """
    communicator.barrier()
    with ONE_AT_A_TIME:
        copies = (taken_over(traced, module) for traced, traced_shape in _TRACED if traced_shape == shape)
        traced = next(filter(None, copies), None)
        if traced is None:
            traced = trace_as_it_runs(module, shape, next(module.parameters()).dtype.to_real())
        own = (traced, shape)
        _TRACED.append(own)
    try:
        communicator.barrier()
    finally:
        with ONE_AT_A_TIME:
            _TRACED[:] = [other for other in _TRACED if other is not own]
    return traced


def trace_as_it_runs(module: nn.Module, shape: tuple[int, ...], dtype: torch.dtype) -> Traced:
    """Return what ``trace`` gives, compared with the model itself; modules in which they differ stay whole.

    Raises:
        ValueError: they differ in the model's own forward, the model cannot be traced, or it updates running
            statistics twice.
    """
    with left_as_it_was(module):
        module.train()
        refuse_checkpointed(checkpointed_norm(module, shape, dtype))
    whole: dict[str, str] = {}
    in_place = False
    while True:
        traced = trace(module, shape, dtype, whole=whole, in_place=in_place)
        difference = first_difference(traced, shape, dtype)
        if difference is None:
            return traced
        if not in_place:
            in_place = True
            continue
        if not (new := difference.paths - whole.keys() - {""}):
            raise ValueError(difference.text)
        whole |= dict.fromkeys(new, "it does something else while it is traced")


def updated_alone(module: nn.Module, shape: tuple[int, ...], communicator: Communicator) -> dict[str, Updated]:
    """Return what ``updated_buffers`` gives for ``module``, which need not be one that can be traced; every rank calls
    it.

    Raises:
        ValueError: one of several ranks would update running statistics twice.
    """
    communicator.barrier()
    with ONE_AT_A_TIME, left_as_it_was(module):
        module.train()
        dtype = next(module.parameters()).dtype.to_real()
        updated = updated_buffers(module, shape, dtype)
        if communicator.world > 1:
            refuse_checkpointed(checkpointed_norm(module, shape, dtype))
    communicator.barrier()
    return updated
