"""Whether a slide is still the one that was indexed: size, time of change, and a digest of a bounded part of its bytes.

Takes a path: a file, the folder of a Zarr slide, a file with its URL, or an MRXS file with its folder; gives a
``SlideState``, and later says whether the path still has it. The digest is of the header, the end, and blocks spread
over the pixels: a slide replaced by another is told from one that was touched or copied. What changes between the
blocks alone is not seen. Of a slide on a server the metadata count alone, which each process asks for once.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Self

from pipelines.slides.slide import SlideError
from pipelines.slides.slide_url import is_url_name

END_BYTES, BLOCK_BYTES, BLOCKS = 64 << 10, 4 << 10, 16
"""Read of a file: both ends, and blocks evenly between them; less than 200 KB."""

MOST_FILES = 1024
"""Of a folder, in order of their names: as many are listed with their sizes."""

FILES_READ = 24
"""Of these, as many are read, evenly spread."""

MOST_ENTRIES = 16
"""Of a folder, as many entries have their time of change looked at, each time a slide is lent."""


@dataclass(frozen=True, slots=True)
class SlideState:
    """What a slide was: bytes of its file (0 of a folder), time of its last change, digest."""

    file_bytes: int
    modified_ns: int
    digest: str

    @classmethod
    def of(cls, path: Path) -> Self:
        """Return the state of the slide at ``path``.

        Raises:
            OSError: it cannot be read.
        """
        return cls(*_size_and_time(path), digest(path))

    @classmethod
    def now(cls, path: Path) -> Self:
        """Return the state of the slide at ``path``, whose bytes are looked at once for each size and time.

        Raises:
            OSError: it cannot be read.
        """
        size_and_time = _size_and_time(path)
        return cls(*size_and_time, _digest_then(path, *size_and_time))

    def is_of(self, path: Path, *, thorough: bool = False) -> bool:
        """Return whether ``path`` is still this: by size and time; by digest if the time differs or if ``thorough``.

        The digest counts for slides on a server, too; one that cannot be asked for is not known to be another, and
        says so when it is opened.
        """
        try:
            file_bytes, modified_ns = _size_and_time(path)
            if file_bytes != self.file_bytes:
                return False
            if thorough:
                return digest(path) == self.digest
            same_time = modified_ns == self.modified_ns and not is_url_name(path.name)
            return same_time or _digest_then(path, file_bytes, modified_ns) == self.digest
        except OSError:
            return False
        except SlideError:
            return True


def digest(path: Path) -> str:
    """32 hexadecimal digits of a bounded part of a slide's bytes.

    Raises:
        OSError: it cannot be read.
        SlideError: the server that has it cannot be asked.
    """
    hasher = hashlib.blake2b(digest_size=16)
    files = list(islice(_files(path), MOST_FILES))
    for file in files:
        hasher.update(f"{os.path.relpath(file, path)}:{file.stat().st_size}\n".encode("utf-8", "surrogateescape"))
    read = files if len(files) <= FILES_READ else [files[i * len(files) // FILES_READ] for i in range(FILES_READ)]
    for file in read:
        for block in _blocks(file):
            hasher.update(block)
    if is_url_name(path.name):
        from pipelines.backends.zarr import remote_metadata  # here, so that no slide library is loaded for files

        hasher.update(remote_metadata(path))
    return hasher.hexdigest()


@lru_cache(4096)
def _digest_then(path: Path, file_bytes: int, modified_ns: int) -> str:
    """The digest, computed once for each size and time: a pool asks before every read."""
    return digest(path)


def _size_and_time(path: Path) -> tuple[int, int]:
    status = path.stat()
    if path.is_dir():
        with os.scandir(path) as entries:
            times = [entry.stat().st_mtime_ns for entry in islice(entries, MOST_ENTRIES)]
        return 0, max([status.st_mtime_ns, *times])
    return status.st_size, status.st_mtime_ns


def _files(path: Path) -> Iterator[Path]:
    """The files of a slide, in a fixed order."""
    if not path.is_dir():
        yield path
    folder = path if path.is_dir() else path.with_suffix("")
    if path.is_dir() or path.suffix.lower() == ".mrxs":
        for name, folders, names in os.walk(folder):
            folders.sort()
            yield from (Path(name, file) for file in sorted(names))


def _blocks(path: Path) -> Iterator[bytes]:
    """Both ends of a file and blocks between them."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        yield os.pread(file.fileno(), END_BYTES, 0)
        between = size - 2 * END_BYTES
        for i in range(BLOCKS if between > 0 else 0):
            yield os.pread(file.fileno(), BLOCK_BYTES, END_BYTES + i * between // BLOCKS)
        yield os.pread(file.fileno(), END_BYTES, max(END_BYTES, size - END_BYTES))
