"""Errors of the system that name the file: a write to an open file fails without saying which one it was."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def names_file(path: Path) -> Iterator[None]:
    """Let an ``OSError`` that names no file name ``path``."""
    try:
        yield
    except OSError as fault:
        if fault.filename is None:
            fault.filename = str(path)
        raise
