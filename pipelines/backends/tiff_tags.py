"""The structure of a TIFF file: pages, tags, tile tables, and what is wrong with them.

Takes a path; gives pages with the few tags that slides need, and a list of faults in words. Reads tags only, never
pixels, and trusts no number in the file: every offset and count is held against the file's size before it is used, so
a damaged file costs neither a crash nor memory. Follows TIFF 6.0, the BigTIFF extension, and Hamamatsu's 64-bit NDPI
layout (8-byte directory offsets; above 4 GiB the upper halves of values follow each directory).
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from pipelines.backends.tiff_page import UNREADABLE, Page, Tag, data_faults
from pipelines.slides.slide import NotThisFormat, SlideError

_KNOWN: Final = frozenset(Tag)
_TYPES: Final = dict(zip((*range(1, 10), 11, 12, 13, 16, 17, 18), "BBHIIbBhifdIQqQ", strict=True))
"""NumPy's letter by TIFF's number of a type; a rational is two of 5."""
_RATIONAL: Final = 5
_BYTES: Final = frozenset({1, 2, 6, 7})
_WHOLE: Final = frozenset({1, 3, 4, 8, 9, 13, 16, 17, 18})
_TYPES_OF: Final = dict.fromkeys((Tag.DESCRIPTION, Tag.SOFTWARE, Tag.JPEG_TABLES, Tag.XMP), _BYTES) | {
    Tag.X_RESOLUTION: frozenset({_RATIONAL}),
    Tag.Y_RESOLUTION: frozenset({_RATIONAL}),
    Tag.NDPI_LENS: _WHOLE | {_RATIONAL, 11, 12},
}
"""Types that a tag may have; all others hold whole numbers. Of another type it would be read as another value."""
MAX_PAGES: Final = 4096
"""More than any slide has (focal planes included): a longer chain is a damaged file that leads to itself."""
MAX_SUB_PAGES: Final = 64
MAX_ENTRIES: Final = 1 << 17
"""Of all directories together, 32 for each of the most pages: a few thousand pages of 65,535 entries take minutes."""
MAX_PAGE_ENTRIES: Final = 1024
MAX_FAULTS: Final = 16
"""As many are found before a file is given up as damaged all over, and no further directory is read."""
MAX_VALUE_BYTES: Final = 1 << 28
"""Of one tag: offsets of 33 million tiles. All tags together may have four times as much."""


@dataclass(frozen=True)
class Tiff:
    """Pages of a file and the faults met while reading them."""

    path: Path
    size_bytes: int
    is_ndpi: bool
    pages: tuple[Page, ...]
    faults: tuple[str, ...]


def check_tiff(path: Path) -> list[str]:
    """Return what is wrong with the structure of a TIFF file, in words; empty if nothing is, or if it is no TIFF.

    Found are tiles, strips and directories past the end of the file, byte counts of 0 or larger than the file, tables
    that are missing or too short, and directories in a circle. Pixels are not decoded.

    Raises:
        OSError: the file cannot be read.
    """
    try:
        tiff = read_tiff(path)
    except NotThisFormat:
        return []
    except SlideError as fault:
        return [str(fault).removeprefix(f"{path}: damaged TIFF: ")]
    faults = list(tiff.faults)
    for page in tiff.pages:
        for level in (page, *page.sub_pages):
            faults += data_faults(level, tiff.size_bytes)
    return faults if len(faults) <= MAX_FAULTS else [*faults[:MAX_FAULTS], f"{len(faults) - MAX_FAULTS} more"]


def read_tiff(path: Path) -> Tiff:
    """Read the pages of a TIFF file.

    Raises:
        NotThisFormat: not a TIFF file.
        SlideError: a TIFF file without one readable page.
        OSError: the file cannot be read.
    """
    with open(path, "rb") as file:
        return _Reader(path, file.fileno()).read()


class _Reader:
    """Reads one file's chain of directories and collects faults instead of stopping at the first."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self._path, self._fd = path, descriptor
        self._size = os.fstat(descriptor).st_size
        self._faults: list[str] = []
        self._seen: set[int] = set()
        self._entries_left, self._value_bytes_left = MAX_ENTRIES, 4 * MAX_VALUE_BYTES
        head = os.pread(descriptor, 16, 0)
        kinds = {b"II*\0": ("<", False), b"MM\0*": (">", False), b"II+\0": ("<", True), b"MM\0+": (">", True)}
        if head[:4] not in kinds:
            raise NotThisFormat(f"{path}: not a TIFF file ({self._size} bytes)")
        self._order, self._big = kinds[head[:4]]
        self._head = head.ljust(16, b"\0")
        self._ndpi = False

    def read(self) -> Tiff:
        offset = self._first_offset()
        pages: list[Page] = []
        while offset and len(pages) < MAX_PAGES:
            page, offset = self._page(offset, len(pages))
            if page is None:
                break
            subs = [self._page(int(at), page.index)[0] for at in page.array(Tag.SUB_IFDS)[:MAX_SUB_PAGES]]
            pages.append(replace(page, sub_pages=tuple(sub for sub in subs if sub is not None)))
        if not pages:
            raise SlideError(f"{self._path}: damaged TIFF: {'; '.join(self._faults) or 'no image in it'}")
        return Tiff(self._path, self._size, self._ndpi, tuple(pages), tuple(self._faults))

    def _first_offset(self) -> int:
        if self._big:
            return int(struct.unpack(self._order + "Q", self._head[8:16])[0])
        if self._order == "<":
            long_offset = int(struct.unpack("<Q", self._head[4:12])[0])
            for offset in (long_offset, long_offset & 0xFFFFFFFF):
                if self._has_tag(offset, Tag.NDPI_FORMAT):
                    self._ndpi = True
                    return offset
        return int(struct.unpack(self._order + "I", self._head[4:8])[0])

    def _has_tag(self, offset: int, tag: int) -> bool:
        if not 8 <= offset <= self._size - 2:
            return False
        count = int.from_bytes(os.pread(self._fd, 2, offset), "little")
        entries = os.pread(self._fd, count * 12, offset + 2)
        return any(entries[i : i + 2] == tag.to_bytes(2, "little") for i in range(0, len(entries), 12))

    def _page(self, offset: int, index: int) -> tuple[Page | None, int]:
        """The page at ``offset`` and the offset of the next, 0 at the end; no page when the directory is damaged."""
        if len(self._faults) >= MAX_FAULTS:
            return None, 0
        if offset in self._seen:
            self._faults.append(f"directory {index} at offset {offset} was read before: the pages form a circle")
            return None, 0
        self._seen.add(offset)
        number_bytes, entry_bytes = (8, 20) if self._big else (2, 12)
        next_bytes = 8 if self._big or self._ndpi else 4
        if not 8 <= offset <= self._size - number_bytes:
            self._faults.append(
                f"directory {index} would be at offset {offset} of a file of {self._size} bytes: the file is cut short"
            )
            return None, 0
        count = int(struct.unpack(self._order + "HQ"[self._big], os.pread(self._fd, number_bytes, offset))[0])
        body_bytes = count * entry_bytes
        self._entries_left -= count
        if body_bytes + next_bytes > self._size - offset - number_bytes:
            self._faults.append(f"directory {index} at offset {offset}: {count} entries do not fit into the file")
            return None, 0
        if count > MAX_PAGE_ENTRIES or self._entries_left < 0:
            self._faults.append(f"directory {index} at offset {offset}: {count} entries are more than a slide has")
            return None, 0
        has_high = self._ndpi and self._size > 0xFFFFFFFF
        body = os.pread(self._fd, body_bytes + next_bytes + (4 * count if has_high else 0), offset + number_bytes)
        tags: dict[int, NDArray[np.generic]] = {}
        for i in range(count):
            high = body[body_bytes + 8 + 4 * i :][:4] if has_high else b""
            self._entry(body[i * entry_bytes : (i + 1) * entry_bytes], high, index, tags)
        following = struct.unpack_from(self._order + ("Q" if next_bytes == 8 else "I"), body, body_bytes)[0]
        numbers = [struct.unpack_from(self._order + "H", body, i * entry_bytes)[0] for i in range(count)]
        return Page(index, tags, is_sorted=numbers == sorted(numbers)), int(following)

    def _entry(self, entry: bytes, high: bytes, index: int, tags: dict[int, NDArray[np.generic]]) -> None:
        """Decode one directory entry into ``tags`` when it is one of the known tags."""
        tag, kind, count = struct.unpack_from(self._order + ("HHQ" if self._big else "HHI"), entry)
        if tag not in _KNOWN:
            return
        allowed = _TYPES_OF.get(Tag(tag), _WHOLE)
        if allowed is not _BYTES:
            tags[tag] = np.array([UNREADABLE])  # until it is read
        if kind not in _TYPES or kind not in allowed or not count:
            what = f"the unknown type {kind}" if kind not in _TYPES else f"{count} values of type {kind}"
            self._faults.append(f"page {index}: tag {tag} ({Tag(tag).name}) has {what}")
            return
        dtype = np.dtype(self._order + _TYPES[kind])
        value_bytes = count * dtype.itemsize * (2 if kind == _RATIONAL else 1)
        field_bytes = entry[12:] if self._big else entry[8:]
        if value_bytes <= len(field_bytes):
            if high and dtype == np.uint32 and count == 1:
                dtype, value_bytes, field_bytes = np.dtype("<u8"), 8, field_bytes + high
            raw = field_bytes[:value_bytes]
        else:
            start = int.from_bytes(field_bytes + high, "little" if self._order == "<" else "big")
            if start + value_bytes > self._size:
                self._faults.append(
                    f"page {index}: tag {tag} ({value_bytes} bytes at offset {start}) "
                    f"lies past the end of the file of {self._size} bytes"
                )
                return
            self._value_bytes_left -= value_bytes
            if value_bytes > MAX_VALUE_BYTES or self._value_bytes_left < 0:
                self._faults.append(f"page {index}: tag {tag} has {value_bytes} bytes; no slide's tags have as many")
                return
            raw = os.pread(self._fd, value_bytes, start)
        values = np.frombuffer(raw, dtype)
        if dtype.kind == "f" and not np.isfinite(values).all():
            self._faults.append(f"page {index}: tag {tag} ({Tag(tag).name}) is {values[0]}")
            return
        tags[tag] = values
