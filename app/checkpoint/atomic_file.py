"""Files that are whole or not there: a temporary one, sealed, flushed to the disk, then renamed.

Takes a path and what to write there. Whatever happens meanwhile, what was there before stays readable. Imports nothing
but the standard library: the process that writes checkpoints starts with it in a twentieth of a second.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable
from pathlib import Path

from app.checkpoint.seal import SealedFile

Span = tuple[int, int]
"""Part of a file: offset and length, bytes."""

READ_AT_ONCE = 1 << 20
"""Bytes: what a cache of the processor holds."""


def write_file(path: Path, write: Callable[[SealedFile], None]) -> None:
    """Write ``path`` with what ``write`` writes, and its checksum behind it.

    Raises:
        OSError: the disk is full or the folder cannot be written; a file that was there before still is.
    """
    temporary = path.with_suffix(".tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Whoever else may still be writing a temporary file, as a run that was killed, keeps it for himself.
        temporary.unlink(missing_ok=True)
        with temporary.open("xb") as file:
            sealed = SealedFile(file)
            write(sealed)
            sealed.seal()
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        sync_folder(path.parent)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def write_spans(path: Path, source: int, spans: Iterable[Span]) -> None:
    """Write ``path`` with parts of another file, one after the other, and a checksum behind them.

    Args:
        source: descriptor of the other file.
        spans: its parts.

    Raises:
        OSError: as ``write_file``.
    """

    chunk = memoryview(bytearray(READ_AT_ONCE))

    def copy(file: SealedFile) -> None:
        for offset, length in spans:
            end = offset + length
            while offset < end:
                count = os.preadv(source, [chunk[: end - offset]], offset)
                assert count, f"{path} is to have bytes {offset} to {end} of a file that is shorter"
                file.write(chunk[:count])
                offset += count

    write_file(path, copy)


def link_file(source: Path, target: Path) -> None:
    """Give the file ``source`` a second name, atomically and without copying its bytes.

    Raises:
        OSError: it could not be done; what had that name before still has.
    """
    temporary = target.with_suffix(".tmp")
    temporary.unlink(missing_ok=True)
    os.link(source, temporary)
    temporary.replace(target)
    sync_folder(target.parent)


def sync_folder(folder: Path) -> None:
    """Make a rename last through a power failure."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
