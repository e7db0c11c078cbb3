"""Page-locked host memory, which a GPU copies from and to while it computes.

torch's own is rounded up to powers of two and never given back; this is memory that the caller has mapped.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import weakref
from collections.abc import Callable

import torch
from torch import Tensor

log = logging.getLogger(__name__)


def page_lock(memory: Tensor) -> Callable[[], object] | None:
    """Page-lock the bytes of ``memory`` for the current GPU, until ``memory`` is freed at the latest.

    Returns:
        A function that unlocks them once all work of the GPU is done. None where the system refuses: copies are slower.
    """
    address = memory.data_ptr()
    if not _succeeds("cudaHostRegister", address, memory.nbytes, 0):
        _warn()
        return None
    unlock = weakref.finalize(memory, _unlock, address, torch.cuda.current_device())
    unlock.atexit = False
    return unlock


def _unlock(address: int, device: int) -> None:
    with contextlib.suppress(RuntimeError):  # of a GPU that has failed
        torch.cuda.synchronize(device)
        _succeeds("cudaHostUnregister", address)


def _succeeds(function: str, *arguments: int) -> bool:
    """Call the CUDA runtime; leave no error behind."""
    if not int(getattr(torch.cuda.cudart(), function)(*arguments)):  # type: ignore[no-untyped-call]
        return True
    # The runtime keeps the error for whoever asks next, as torch does after each kernel: so let one fail here.
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device="cuda").add_(1)
    return False


@functools.cache
def _warn() -> None:
    log.warning(
        "CUDA refuses to page-lock host memory: copies between host and GPU take longer. Allow more locked memory "
        "(ulimit -l), or move less to the host"
    )
