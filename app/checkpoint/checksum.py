"""The checksum at the end of a checkpoint, which shows whether its bytes are those that were written.

Takes a file while it is written or to be read. The checksum is ``LENGTH`` bytes at the end of the file itself, which
``torch.load`` ignores, so that one rename and one link serve both.
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


class ChecksumError(Exception):
    """A file that is not as it was written; the message says how that shows."""


class HashingWriter:
    """A file that is written to, and the checksum of what was written.

    Attributes:
        error: of the last write that failed; torch reports only where it stopped.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._digest = blake2b(digest_size=DIGEST_BYTES)
        self.error: OSError | None = None

    def write(self, data: bytes | memoryview, /) -> int:
        """Write ``data``; return the number of bytes written."""
        self._digest.update(data)
        try:
            return self._file.write(data)
        except OSError as error:
            self.error = error
            raise

    def flush(self) -> None:
        """Flush the file."""
        self._file.flush()

    def finish(self) -> None:
        """End the file with its checksum."""
        self._file.write(_tail(self._digest.hexdigest()))


def check_bytes(file: BinaryIO) -> None:
    """Compare all of ``file``, open at whatever position, with its checksum, and go back to its start.

    Raises:
        ChecksumError: the file has no checksum, or another than that of its bytes.
    """
    length = file.seek(0, os.SEEK_END) - LENGTH
    file.seek(max(0, length))
    tail = file.read()
    if length < 0 or not tail.startswith(MAGIC):
        raise ChecksumError("it does not end with a checksum: it was cut short, or a version before checksums wrote it")
    digest, left = blake2b(digest_size=DIGEST_BYTES), length
    file.seek(0)
    while left:
        data = file.read(min(left, READ_AT_ONCE))
        digest.update(data)
        left -= len(data)
    if tail != _tail(digest.hexdigest()):
        raise ChecksumError("its bytes are not those that were written: their checksum differs")
    file.seek(0)


def has_checksum(file: BinaryIO) -> bool:
    """Return whether ``file`` ends with a checksum, right or wrong."""
    end = file.seek(0, os.SEEK_END)
    file.seek(max(0, end - LENGTH - ZIP_END_BYTES))
    tail = file.read()
    return tail[ZIP_END_BYTES:].startswith(MAGIC) or (
        len(tail) == LENGTH + ZIP_END_BYTES and tail.startswith(ZIP_END) and ZIP_END not in tail[1:]
    )


def _tail(digest: str) -> bytes:
    return MAGIC + digest.encode() + b"\n"
