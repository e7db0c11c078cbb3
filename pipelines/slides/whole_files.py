"""Files that a reader sees as they were before or as a whole, whatever ends the writer in between."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path


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
