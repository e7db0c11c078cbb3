"""Counts bytes of tensors that are alive. (``LiveBytes`` follows.)"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def not_counted() -> Iterator[None]:
    """Tensors made within the block are on the host, whatever device they are for."""
    yield
