"""A reader that leaves early, as ``head`` does, ends no command: what is said to nobody is dropped.

Takes this process's standard streams; those that lead into a pipe are replaced by ones that never fail.
"""

from __future__ import annotations

import io
import os
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


class _Drained(io.FileIO):
    """A descriptor whose reader may go."""

    def write(self, data: ReadableBuffer) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            return memoryview(data).nbytes


@contextmanager
def ignore_broken_pipe() -> Iterator[None]:
    """While this lasts, writing to a closed pipe is no fault, for ``print`` and whatever else writes to the streams."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = map(_drained, before)
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        sys.stdout, sys.stderr = before


def _drained(stream: TextIO) -> TextIO:
    try:
        descriptor = stream.fileno()
    except (OSError, AttributeError, ValueError):  # no file at all, as where output is captured
        return stream
    mode = os.fstat(descriptor).st_mode
    if not (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)):
        return stream
    stream.flush()
    raw = _Drained(descriptor, "w", closefd=False)
    return io.TextIOWrapper(io.BufferedWriter(raw), stream.encoding, stream.errors, line_buffering=stream is sys.stderr)
