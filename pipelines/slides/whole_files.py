"""Files that a reader sees as they were before or as a whole, whatever ends the writer in between; locks of files."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL)
"""Errors of ``flock`` on a file system without locks."""


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a path in the same folder to write to; the file takes the place of ``path`` at the end of the block.

    After an error ``path`` is as it was, and the other file is removed.

    Raises:
        OSError: the folder cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")  # a process id is that of one host
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> Path:
    """Write ``text`` to ``path`` as a whole, and return the path."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8", newline="")
    return path


def lock(descriptor: int, operation: int = fcntl.LOCK_EX) -> bool:
    """Lock an open file as ``fcntl.flock`` does. Return False on a file system without locks, where nothing is locked.

    Raises:
        OSError: as of ``fcntl.flock``; BlockingIOError if ``operation`` does not wait.
    """
    try:
        fcntl.flock(descriptor, operation)
    except OSError as fault:
        if fault.errno not in NO_LOCKS:
            raise
        return False
    return True
