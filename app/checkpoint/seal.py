"""The checksum at the end of a checkpoint, which shows whether its bytes are those that were written.

Takes a file while it is written or to be read; what is sealed ends with ``LENGTH`` bytes more, which ``torch.load``
does not look at. In the file itself, so that one rename brings both and a second name has both. Imports nothing but the
standard library: the process that writes checkpoints computes it.
"""

from __future__ import annotations

import os
from hashlib import blake2b
from typing import BinaryIO

MAGIC = b"MegaTile blake2b "
DIGEST_BYTES = 16
LENGTH = len(MAGIC) + 2 * DIGEST_BYTES + 1
READ_AT_ONCE = 1 << 20

ZIP_END = b"PK\x05\x06"
ZIP_END_BYTES = 22
"""What ``torch.save`` ends a file with (ZIP's end of central directory, without a comment)."""


class SealError(Exception):
    """A file that is not as it was written; the message says how that shows."""


class SealedFile:
    """A file that is written to, and the checksum of what was written."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._digest = blake2b(digest_size=DIGEST_BYTES)

    def write(self, data: bytes | memoryview, /) -> int:
        """Write ``data``; return the number of bytes written."""
        self._digest.update(data)
        return self._file.write(data)

    def flush(self) -> None:
        """Flush the file."""
        self._file.flush()

    def seal(self) -> None:
        """End the file with its checksum."""
        self._file.write(_tail(self._digest.hexdigest()))


def check_seal(file: BinaryIO) -> None:
    """Compare all of ``file``, open at whatever position, with its checksum, and go back to its start.

    Raises:
        SealError: the file has no seal, or another than its bytes.
    """
    length = file.seek(0, os.SEEK_END) - LENGTH
    file.seek(max(0, length))
    tail = file.read()
    if length < 0 or not tail.startswith(MAGIC):
        raise SealError("it does not end with a checksum: it was cut short, or a version before checksums wrote it")
    digest, left = blake2b(digest_size=DIGEST_BYTES), length
    file.seek(0)
    while left:
        data = file.read(min(left, READ_AT_ONCE))
        digest.update(data)
        left -= len(data)
    if tail != _tail(digest.hexdigest()):
        raise SealError("its bytes are not those that were written: their checksum differs")
    file.seek(0)


def has_seal(file: BinaryIO) -> bool:
    """Return whether ``file`` ends with a seal, be it damaged itself."""
    end = file.seek(0, os.SEEK_END)
    file.seek(max(0, end - LENGTH - ZIP_END_BYTES))
    tail = file.read()
    return tail[ZIP_END_BYTES:].startswith(MAGIC) or (
        len(tail) == LENGTH + ZIP_END_BYTES and tail.startswith(ZIP_END) and ZIP_END not in tail[1:]
    )


def _tail(digest: str) -> bytes:
    return MAGIC + digest.encode() + b"\n"
