"""The elements of a DICOM file one after the other, sequences among them, as DICOM PS3.5 section 7 lays them out.

Takes a file at an element, gives tags, lengths and the values that are asked for; nothing else is kept, so that a file
with the places of a million frames costs no memory. Little endian, explicit or, where it is said so, implicit; what
is wrong raises EOFError (cut short) and ValueError (no DICOM data).
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO, Final

ITEM, ITEM_END, SEQUENCE_END = 0xFFFEE000, 0xFFFEE00D, 0xFFFEE0DD
UNDEFINED: Final = 0xFFFFFFFF
"""Length of a value that ends with a delimiter."""

PREAMBLE_BYTES: Final = 132
SYNTAX: Final = 0x00020010
PIXELS: Final = 0x7FE00010
IMPLICIT: Final = "1.2.840.10008.1.2"
"""Transfer syntax whose elements do not say of what kind their value is."""
OTHERWISE_WRITTEN: Final = frozenset((IMPLICIT, "1.2.840.10008.1.2.1.99", "1.2.840.10008.1.2.2"))
"""Implicit, deflated, big endian: transfer syntaxes whose elements are not laid out as those of all others."""

_LONG: Final = frozenset((b"OB", b"OD", b"OF", b"OL", b"OV", b"OW", b"SQ", b"SV", b"UC", b"UN", b"UR", b"UT", b"UV"))
"""Value representations with a length of four bytes."""
_DEEPEST: Final = 16
DEEPEST_READ: Final = 64
"""Sequences inside one another that libdicom, which recurses without a bound, is given."""
_VALUE_BYTES: Final = 1024
_ITEM_BYTES: Final = b"\xfe\xff\x00\xe0"


@dataclass(frozen=True, slots=True)
class Wanted:
    """Tags of what is kept, at any depth: single values, and sequences with what is wanted of their items.

    ``is_implicit``: how the elements are written.
    """

    values: Collection[int]
    sequences: Collection[int]
    is_implicit: bool = False


@dataclass(frozen=True, slots=True)
class Item:
    """Requested part of a data set: values as stored, and the items of sequences, by tag."""

    values: dict[int, bytes] = field(default_factory=dict)
    sequences: dict[int, list[Item]] = field(default_factory=dict)

    def text(self, tag: int, default: str = "") -> str:
        """Return an ASCII value without its padding."""
        return self.values.get(tag, default.encode()).rstrip(b"\0 ").decode("ascii", "replace").strip()

    def number(self, tag: int, default: int) -> int:
        """Return an unsigned binary value of two or four bytes; ``default`` where there is none."""
        value = self.values.get(tag, b"")
        return int.from_bytes(value, "little") if len(value) in (2, 4) else default

    def first(self, tag: int) -> Item:
        """Return the first item of a sequence; an empty one where there is none."""
        items = self.sequences.get(tag)
        return items[0] if items else Item()


def is_dicom(path: Path) -> bool:
    """Return whether the file begins as a DICOM file does."""
    with path.open("rb") as file:
        return file.read(PREAMBLE_BYTES)[128:] == b"DICM"


@lru_cache(maxsize=4096)
def is_nested_too_deep(path: Path, size: int, changed_ns: int) -> bool:
    """Return whether sequences of a DICOM file lie more than ``DEEPEST_READ`` deep in one another, before its pixels.

    Malformed elements end the search, as they end libdicom's. ``size`` and ``changed_ns`` only key the cache.
    """
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        at, end, ends = PREAMBLE_BYTES, len(data), [len(data)]
        syntax, is_implicit = b"", False
        while at + 8 <= end:
            while len(ends) > 1 and at >= ends[-1]:
                ends.pop()
            group, element, kind, length = struct.unpack_from("<HH2sH", data, at)
            tag, start = group << 16 | element, at + 8
            is_implicit = group > 2 and syntax == IMPLICIT.encode()
            if tag in (ITEM_END, SEQUENCE_END):
                if len(ends) > 1:
                    ends.pop()
                at = start
                continue
            if is_implicit or tag == ITEM:
                (length,) = struct.unpack_from("<I", data, at + 4)
            elif kind in _LONG and at + 12 <= end:
                (length,) = struct.unpack_from("<I", data, at + 8)
                start = at + 12
            elif not (kind.isalpha() and kind.isupper()):
                return False
            if tag == PIXELS and len(ends) == 1:
                return False
            begins_item = data[start : start + 4] == _ITEM_BYTES
            if tag == ITEM or length == UNDEFINED or kind == b"SQ" or (is_implicit and length >= 8 and begins_item):
                ends.append(end if length == UNDEFINED else min(end, start + length))
                at = start
            else:
                if tag == SYNTAX:
                    syntax = data[start : start + min(length, _VALUE_BYTES)].rstrip(b"\0 ")
                at = start + length
            if len(ends) > 2 * DEEPEST_READ:  # an item and its sequence each count
                return True
    return False


def read_meta(file: BinaryIO, wanted: Wanted, item: Item) -> None:
    """Put what is ``wanted`` of group 2, which is always explicit, into ``item``; the file is left behind it."""
    while True:
        start = file.tell()
        group = file.read(2)
        file.seek(start)
        if group != b"\2\0":
            return
        tag, length = next(elements(file, 0))
        keep(item, tag, length, wanted, file, 0)


def read_until(
    stops: Collection[int], file: BinaryIO, wanted: Wanted, item: Item, last: int = UNDEFINED
) -> tuple[int, int] | None:
    """Put what is ``wanted`` into ``item`` up to one of the tags ``stops``, whose tag and length are returned, the file
    at its value; None where the file has none, or has come behind the tag ``last``."""
    for tag, length in elements(file, 0, wanted.is_implicit):
        if tag in stops:
            return tag, length
        if tag > last:
            return None
        keep(item, tag, length, wanted, file, 0)
    return None


def elements(file: BinaryIO, depth: int, is_implicit: bool = False) -> Iterator[tuple[int, int]]:
    """Yield (tag, length) of the elements from here on, the file at the value of each; the caller reads or skips it."""
    if depth > _DEEPEST:
        raise ValueError(f"sequences {depth} deep")
    while True:
        head = file.read(8)
        if not head and depth == 0:
            return
        if len(head) < 8:
            raise EOFError
        group, element, kind, short = struct.unpack("<HH2sH", head)
        tag = group << 16 | element
        if is_implicit or tag in (ITEM, ITEM_END, SEQUENCE_END):
            yield tag, int.from_bytes(head[4:], "little")
        elif kind in _LONG:
            yield tag, int.from_bytes(exactly(file, 4), "little")
        elif kind.isalpha() and kind.isupper():
            yield tag, short
        else:
            raise ValueError(f"value of kind {kind!r}")


def skip(file: BinaryIO, length: int, depth: int, is_implicit: bool = False) -> None:
    """Pass over a value, which is a sequence where its length is not said."""
    if length != UNDEFINED:
        file.seek(length, 1)
        return
    for tag, inner in elements(file, depth + 1, is_implicit):
        if tag in (ITEM_END, SEQUENCE_END):
            return
        skip(file, inner, depth + 1, is_implicit)


def exactly(file: BinaryIO, length: int) -> bytes:
    """Return the next ``length`` bytes. Raises EOFError where the file ends before."""
    value = file.read(length)
    if len(value) < length:
        raise EOFError
    return value


def keep(item: Item, tag: int, length: int, wanted: Wanted, file: BinaryIO, depth: int) -> None:
    """Put the value at the file's place into ``item`` if its tag is ``wanted``, and pass over it otherwise."""
    if tag in wanted.sequences:
        item.sequences[tag] = list(items(file, length, wanted, depth + 1))
    elif tag in wanted.values and length <= _VALUE_BYTES:
        item.values[tag] = exactly(file, length)
    else:
        skip(file, length, depth, wanted.is_implicit)


def items(file: BinaryIO, length: int, wanted: Wanted, depth: int) -> Iterator[Item]:
    """Yield what is ``wanted`` of each item of a sequence of ``length`` bytes, the file at its value."""
    end = None if length == UNDEFINED else file.tell() + length
    while end is None or file.tell() < end:
        tag, item_length = next(elements(file, depth, wanted.is_implicit))
        if tag == SEQUENCE_END:
            return
        if tag != ITEM:
            raise ValueError(f"element {tag:08x} between the items of a sequence")
        yield _item(file, item_length, wanted, depth + 1)


def _item(file: BinaryIO, length: int, wanted: Wanted, depth: int) -> Item:
    end = None if length == UNDEFINED else file.tell() + length
    item, inside = Item(), elements(file, depth, wanted.is_implicit)
    while end is None or file.tell() < end:
        tag, inner = next(inside)
        if tag == ITEM_END:
            break
        keep(item, tag, inner, wanted, file, depth)
    return item
