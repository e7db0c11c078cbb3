"""Open slides, reused by later reads, and whether a slide is still the one that was indexed.

A ``SlidePool`` keeps a bounded number of slides open and closes the least recently used first, never a lent one. It is
not to be forked or pickled. A ``SlideState`` has size, time of change and a digest of the header, the end, and blocks
spread over the file; changes between the blocks are not seen. Of a slide on a server the metadata count.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Self

from pipelines.backends.dicom_head import series_uid
from pipelines.slides.slide import Slide, SlideError, url_of

if TYPE_CHECKING:
    from pipelines.catalog.catalog import SlideSpec

CHECK_EVERY_S = 2.0
"""A slide is compared with the one that was indexed when it is opened, also after a read that failed. While it is open
it is compared at most so often: a stat for each tile is slow on network file systems. A replaced file is noticed so
late."""


class _Handle:
    """One slide of the pool; its lock is held while it is opened, so that two threads do not open it twice."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.slide: Slide | None = None
        self.leases = 0
        self.discarded = False
        self.checked_s = 0.0


class SlidePool:
    """Lends open slides by id.

    Args:
        specs: the slides, each opened in the thread that first leases it.
        capacity: slides kept open when none is lent, at least 1.
        open_spec: opens one; ``SlideSpec.open`` by default.
    """

    def __init__(
        self, specs: Sequence[SlideSpec], capacity: int, open_spec: Callable[[SlideSpec], Slide] | None = None
    ) -> None:
        self._specs = {spec.slide_id: spec for spec in specs}
        self.capacity = capacity
        self._open = open_spec or (lambda spec: spec.open())
        self._lock = threading.Lock()
        self._handles: OrderedDict[str, _Handle] = OrderedDict()  # the least recently used first
        self._closed = False

    @contextmanager
    def lease(self, slide_id: str) -> Iterator[Slide]:
        """Lend the open slide, shared with other threads, not closed while the ``with`` block runs.

        Raises:
            KeyError: no spec has this id.
            SlideError: the slide cannot be opened (it is tried again on the next lease), is no longer the one that was
                indexed, or the pool is closed.
        """
        spec = self._specs[slide_id]
        with self._lock:
            if self._closed:
                raise SlideError(f"slide {slide_id!r} was asked of a closed pool")
            handle = self._handles.setdefault(slide_id, _Handle())
            self._handles.move_to_end(slide_id)
            handle.leases += 1
            unused = self._take_unused(handle)
        try:
            for slide in unused:  # before another is opened
                slide.close()
            with handle.lock:
                now_s = time.monotonic()
                if handle.slide is None or now_s - handle.checked_s >= CHECK_EVERY_S:
                    spec.verify_unchanged()
                    handle.checked_s = now_s
                if handle.slide is None:
                    handle.slide = self._open(spec)
            yield handle.slide
        finally:
            with self._lock:
                handle.leases -= 1
                if handle.slide is None and handle.leases == 0 and self._handles.get(slide_id) is handle:
                    del self._handles[slide_id]
                unused = self._take_unused(handle)
            for slide in unused:
                slide.close()

    def discard(self, slide_id: str) -> None:
        """Forget an open slide, because a read of it failed: the next lease opens it anew.

        Threads that have it keep it; the last of them closes it. Without effect when the slide is not open.
        """
        with self._lock:
            handle = self._handles.pop(slide_id, None)
            if handle is None:
                return
            handle.discarded = True
            unused = self._take_unused(handle)
        for slide in unused:
            slide.close()

    def _take_unused(self, handle: _Handle) -> list[Slide]:
        """Slides to close now: ``handle``'s when it was discarded and is not lent, and what exceeds the capacity."""
        unused: list[Slide] = []
        if handle.discarded and handle.leases == 0 and handle.slide is not None:
            unused.append(handle.slide)
            handle.slide = None
        for slide_id in [i for i, h in self._handles.items() if h.leases == 0]:
            if len(self._handles) <= self.capacity:
                break
            slide = self._handles.pop(slide_id).slide
            if slide is not None:
                unused.append(slide)
        return unused

    def close(self) -> None:
        """Close every slide; one that is lent is closed when it comes back. Later leases are refused."""
        with self._lock:
            self._closed = True
            handles = list(self._handles.values())
            self._handles.clear()
            unused: list[Slide] = []
            for handle in handles:
                handle.discarded = True
                unused += self._take_unused(handle)
        for slide in unused:
            slide.close()


HAMAMATSU_INDEXES, HEAD_BYTES = frozenset({".vms", ".vmu"}), 256 << 10
"""Text files that name the JPEG files which are their slide's pixels, and as much of one as is read: all of it."""
END_BYTES, BLOCK_BYTES, BLOCKS = 64 << 10, 4 << 10, 16
"""Read of a file: both ends, and blocks evenly between them; less than 200 KB."""

MOST_FILES = 1024
"""Of a folder, files that are listed with their sizes, in order of their names."""

FILES_READ = 24
"""Of these, the ones that are read, evenly spread."""

MOST_ENTRIES = 16
"""Of a folder, entries whose time of change is looked at, each time a slide is lent."""


@dataclass(frozen=True, slots=True)
class SlideState:
    """State of a slide: bytes of its file (0 of a folder), time of its last change, digest."""

    file_bytes: int
    modified_ns: int
    digest: str

    @classmethod
    def of(cls, path: Path) -> Self:
        """Return the state of the slide at ``path``. Raises OSError where it cannot be read."""
        return cls(*_size_and_time(path), digest(path))

    @classmethod
    def now(cls, path: Path) -> Self:
        """Return the same; the slide's bytes are read once for each size and time."""
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
            same_time = modified_ns == self.modified_ns and url_of(path) is None
            return same_time or _digest_then(path, file_bytes, modified_ns) == self.digest
        except OSError:
            return False
        except SlideError:
            return True


def digest(path: Path) -> str:
    """32 hexadecimal digits of a bounded part of a slide's bytes; of one at a URL, of the URL and its metadata.

    Raises:
        OSError: it cannot be read.
        SlideError: the server that has it cannot be asked.
    """
    if url_of(path) is not None:
        from pipelines.backends.zarr import remote_metadata  # here, so that no slide library is loaded for files

        return hashlib.blake2b(f"{path}\n".encode() + remote_metadata(path), digest_size=16).hexdigest()
    hasher = hashlib.blake2b(digest_size=16)
    files = list(islice(_files(path), MOST_FILES))
    for file in files:
        hasher.update(f"{os.path.relpath(file, path)}:{file.stat().st_size}\n".encode("utf-8", "surrogateescape"))
    read = files if len(files) <= FILES_READ else [files[i * len(files) // FILES_READ] for i in range(FILES_READ)]
    for file in read:
        for block in _blocks(file):
            hasher.update(block)
    return hasher.hexdigest()


@lru_cache(4096)
def _digest_then(path: Path, file_bytes: int, modified_ns: int) -> str:
    """The digest, computed once for each size and time: a pool asks before every read."""
    return digest(path)


def _size_and_time(path: Path) -> tuple[int, int]:
    if url_of(path) is not None:
        return 0, 0
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
    folder, suffix = path if path.is_dir() else path.with_suffix(""), path.suffix.lower()
    if path.is_dir() or suffix == ".mrxs":
        for name, folders, names in os.walk(folder):
            folders.sort()
            yield from (Path(name, file) for file in sorted(names))
    elif suffix == ".dcm" and (series := series_uid(path)):
        of_series = _by_series(path.parent, path.parent.stat().st_mtime_ns)[series]
        yield from (file for file in of_series if file != path)
    elif suffix in HAMAMATSU_INDEXES:
        named = hamamatsu_parts(path, os.listdir(path.parent))
        yield from filter(Path.is_file, (path.with_name(name) for name in sorted(named)))


def hamamatsu_parts(index: Path, names: Collection[str]) -> set[str]:
    """Return the files of ``names``, of the same folder, that a VMS or VMU file names, such as its pixels.

    Raises:
        OSError: it cannot be read.
    """
    with index.open("rb") as file:  # lines such as ImageFile=slide.jpg
        lines = file.read(HEAD_BYTES).decode("utf-8", "replace").splitlines()
    return {line.partition("=")[2].strip() for line in lines}.intersection(names)


@lru_cache(64)
def _by_series(folder: Path, modified_ns: int) -> dict[str, list[Path]]:
    """The DICOM files of a folder that was changed at ``modified_ns``, in a fixed order, by their series."""
    found: dict[str, list[Path]] = defaultdict(list)
    for file in sorted(filter(Path.is_file, folder.iterdir())):
        if series := series_uid(file):
            found[series].append(file)
    return found


def _blocks(path: Path) -> Iterator[bytes]:
    """Both ends of a file and blocks between them."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        yield os.pread(file.fileno(), END_BYTES, 0)
        between = size - 2 * END_BYTES
        for i in range(BLOCKS if between > 0 else 0):
            yield os.pread(file.fileno(), BLOCK_BYTES, END_BYTES + i * between // BLOCKS)
        yield os.pread(file.fileno(), END_BYTES, max(END_BYTES, size - END_BYTES))
