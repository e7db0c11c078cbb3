"""Damage, seeded and named: what bit rot, a broken copy or an attacker make of a file.

Takes the bytes of a whole file, its map (``Layout``: where tags and pixels lie) and a random generator; gives other
bytes and the name of what was done. Nothing here knows how the project reads a file: tags are found by tifffile.
"""

from __future__ import annotations

import json
import random
import re
import shutil
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tifffile

Mutator = Callable[[bytearray, "Layout", random.Random], None]

NUMBERS = (0, 1, 2, 3, 5, 7, 8, 255, 256, 4096, 65535, 65536, 2**31 - 1, 2**31, 2**32 - 1)
"""What a number of a header is replaced by: the edges of the types, and values that mean something in TIFF."""

HEADER_BYTES = 512
TRAILER_BYTES = 16
"""Of a PNG, after its pixels."""

JSON_VALUES: tuple[Any, ...] = (0, 1, -1, 2**31, 2**63, 10**30, 1e308, float("nan"), float("inf"), None, True)
JSON_VALUES += ("", "x", "../../x", [], {}, [0], [-1, 0], "nan", 0.5)
"""What a value of JSON metadata is replaced by."""
XML_VALUES = ("", "0", "-1", "1", "2", "5", "1e9", "1e308", "-1e999", "nan", "inf", "10" * 30, "x", "../../x", "&#0;")
XML_VALUES += ("&lt;", "Polygon", "Dot", "Rectangle", "None", "0x10", "1_0", "\u0663")
"""What the value of an attribute is replaced by."""
WORDS = (b"inf", b"nan", b"-1", b"0", b"1e999", b"99999999999999999999", b"\x00", b"\xff\xfe", b'"', b"<", b"|", b"=")


@dataclass(frozen=True)
class Entry:
    """One tag of a TIFF directory: where the entry and its values lie."""

    at: int
    value_at: int
    value_bytes: int
    code: int


@dataclass(frozen=True)
class Layout:
    """Places of tags and pixels in a whole file.

    Attributes:
        entries: of all TIFF directories; none in other files.
        payload: (start, end) of compressed pixels.
        big: whether it is a BigTIFF.
    """

    entries: tuple[Entry, ...]
    payload: tuple[tuple[int, int], ...]
    big: bool = False


def layout_of(path: Path) -> Layout:
    """The map of a file."""
    data = path.read_bytes()
    if data[:2] in (b"II", b"MM"):
        with tifffile.TiffFile(path) as file:
            pages = [page for series in file.pages for page in (series, *(series.pages or ()))]
            entries = tuple(_entries(page) for page in pages)
            payload = [
                (offset, offset + count)
                for page in pages
                for offset, count in zip(page.dataoffsets, page.databytecounts, strict=False)
            ]
            return Layout(tuple(e for page in entries for e in page), tuple(payload), file.is_bigtiff)
    if data[:4] == b"\x89PNG":
        start = data.index(b"IDAT") + 4
        return Layout((), ((start, len(data) - 16),))
    if data[:2] == b"\xff\xd8":
        start = data.index(b"\xff\xda")
        return Layout((), ((start, len(data)),))
    if data[128:132] == b"DICM":
        return Layout((), ((data.rindex(b"\xe0\x7f\x10\x00") + 12, len(data)),))
    return Layout((), ((0, len(data)),))


def _entries(page: tifffile.TiffPage) -> list[Entry]:
    return [Entry(t.offset, t.valueoffset, t.valuebytecount, t.code) for t in page.tags]


def is_payload(old: bytes, new: bytes, layout: Layout) -> bool:
    """True when all that differs lies within compressed pixels; where bytes moved, all from the first that differs."""
    if len(old) != len(new):
        shorter = min(len(old), len(new))
        differing = np.frombuffer(old[:shorter], np.uint8) != np.frombuffer(new[:shorter], np.uint8)
        first = int(differing.argmax()) if differing.any() else shorter
        return any(start <= first < end and end >= len(old) - TRAILER_BYTES for start, end in layout.payload)
    differing = np.frombuffer(old, np.uint8) != np.frombuffer(new, np.uint8)
    for start, end in layout.payload:
        differing[start:end] = False
    return not differing.any()


def _flip(data: bytearray, at: int, chance: random.Random) -> None:
    data[at % len(data)] ^= 1 << chance.randrange(8)


def flip_header(data: bytearray, layout: Layout, chance: random.Random) -> None:
    _flip(data, chance.randrange(min(len(data), HEADER_BYTES)), chance)


def flip_magic(data: bytearray, layout: Layout, chance: random.Random) -> None:
    _flip(data, chance.randrange(16), chance)


def flip_anywhere(data: bytearray, layout: Layout, chance: random.Random) -> None:
    for _ in range(chance.choice((1, 1, 1, 8))):
        _flip(data, chance.randrange(len(data)), chance)


def flip_entry(data: bytearray, layout: Layout, chance: random.Random) -> None:
    _flip(data, chance.choice(layout.entries).at + chance.randrange(20 if layout.big else 12), chance)


def flip_value(data: bytearray, layout: Layout, chance: random.Random) -> None:
    entry = chance.choice(layout.entries)
    _flip(data, entry.value_at + chance.randrange(max(1, entry.value_bytes)), chance)


def flip_payload(data: bytearray, layout: Layout, chance: random.Random) -> None:
    start, end = chance.choice(layout.payload)
    _flip(data, chance.randrange(start, max(start + 1, end)), chance)


def truncate(data: bytearray, layout: Layout, chance: random.Random) -> None:
    del data[chance.choice((chance.randrange(len(data)), chance.randrange(min(len(data), 2048)), len(data) - 1)) :]


def zeros(data: bytearray, layout: Layout, chance: random.Random) -> None:
    _run(data, chance, b"\x00")


def ones(data: bytearray, layout: Layout, chance: random.Random) -> None:
    _run(data, chance, b"\xff")


def _run(data: bytearray, chance: random.Random, byte: bytes) -> None:
    start, length = chance.randrange(len(data)), chance.choice((1, 4, 16, 256, 4096))
    end = min(len(data), start + length)
    data[start:end] = byte * (end - start)


def splice(data: bytearray, layout: Layout, chance: random.Random) -> None:
    """Bytes of another place of the same file."""
    length = min(len(data) // 2, chance.choice((4, 64, 1024, 65536)))
    source, target = chance.randrange(len(data) - length), chance.randrange(len(data) - length)
    data[target : target + length] = data[source : source + length]


def insert(data: bytearray, layout: Layout, chance: random.Random) -> None:
    at = chance.randrange(len(data))
    data[at:at] = chance.randbytes(chance.choice((1, 2, 64)))


def header_number(data: bytearray, layout: Layout, chance: random.Random) -> None:
    """A 2- or 4-byte number near the start of a file without a directory, either byte order."""
    width, at = chance.choice((2, 4)), chance.randrange(min(len(data) - 4, HEADER_BYTES))
    data[at : at + width] = chance.choice(NUMBERS).to_bytes(8, "little")[:width][:: chance.choice((1, -1))]


def word(data: bytearray, layout: Layout, chance: random.Random) -> None:
    """Text in place of a run of digits or letters: an mpp of inf, a quote left open."""
    digits = [i for i in range(min(len(data), 1 << 16)) if data[i : i + 1].isdigit()] or [0]
    at = chance.choice(digits)
    data[at : at + chance.choice((0, 1, 4))] = chance.choice(WORDS)


def word_in_place(data: bytearray, layout: Layout, chance: random.Random) -> None:
    """The same within the values of a tag, without moving what lies behind."""
    texts = [e for e in layout.entries if e.value_bytes > 8] or list(layout.entries)
    entry = chance.choice(texts)
    digits = [i for i in range(entry.value_at, entry.value_at + entry.value_bytes) if data[i : i + 1].isdigit()]
    at, text = chance.choice(digits or [entry.value_at]), chance.choice(WORDS)
    data[at : at + len(text)] = text


def set_type(data: bytearray, layout: Layout, chance: random.Random) -> None:
    at = chance.choice(layout.entries).at + 2
    data[at : at + 2] = struct.pack("<H", chance.choice((0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 16, 17, 255)))


def set_count(data: bytearray, layout: Layout, chance: random.Random) -> None:
    at, width = chance.choice(layout.entries).at + 4, 8 if layout.big else 4
    old = int.from_bytes(data[at : at + width], "little")
    new = chance.choice((*NUMBERS, old - 1, old + 1, old * 2, 2**63)) % (1 << 8 * width)
    data[at : at + width] = new.to_bytes(width, "little")


def set_value(data: bytearray, layout: Layout, chance: random.Random) -> None:
    """The inline value of an entry, or its offset."""
    at, width = chance.choice(layout.entries).at + (12 if layout.big else 8), 8 if layout.big else 4
    new = chance.choice((*NUMBERS, len(data) - 1, len(data), 2**63)) % (1 << 8 * width)
    data[at : at + width] = new.to_bytes(width, "little")


def set_table(data: bytearray, layout: Layout, chance: random.Random) -> None:
    """One number of the table of tile or strip offsets, or of byte counts."""
    tables = [e for e in layout.entries if e.code in (273, 279, 324, 325, 65426)] or list(layout.entries)
    entry, width = chance.choice(tables), 4
    at = entry.value_at + width * chance.randrange(max(1, entry.value_bytes // width))
    data[at : at + width] = chance.choice((*NUMBERS, len(data) - 1)).to_bytes(8, "little")[:width]


def swap_tags(data: bytearray, layout: Layout, chance: random.Random) -> None:
    """Two entries change their numbers, or all but their numbers."""
    one, two = (chance.choice(layout.entries).at for _ in range(2))
    length = chance.choice((2, 20 if layout.big else 12))
    data[one : one + length], data[two : two + length] = data[two : two + length], data[one : one + length]


def retag(data: bytearray, layout: Layout, chance: random.Random) -> None:
    entry, other = chance.choice(layout.entries), chance.choice(layout.entries)
    data[entry.at : entry.at + 2] = struct.pack("<H", chance.choice((other.code, 0, 65535, 330, 317, 347)))


ANY = (flip_header, flip_magic, flip_anywhere, flip_payload, truncate, zeros, ones, splice, insert)
OF_TIFF = (*ANY, flip_entry, flip_entry, flip_value, flip_value, set_type, set_count, set_value, set_value)
OF_TIFF += (set_table, set_table, swap_tags, retag, word_in_place)
OF_HEADERS = (*ANY, header_number, header_number, header_number)
OF_TEXT = (*ANY, word, word, word)


def mutate_file(path: Path, layout: Layout, chance: random.Random) -> tuple[str, bool]:
    """Damage a file in place.

    Returns:
        what was done, and whether only compressed pixels were touched.
    """
    old = path.read_bytes()
    if path.suffix in (".geojson", ".json") and chance.random() < 0.6:
        _edit_json(path, chance)
        return "edit_json", True
    if path.suffix == ".xml" and chance.random() < 0.6:
        _edit_xml(path, chance)
        return "edit_xml", True
    text = path.suffix in (".geojson", ".json", ".xml", ".csv")
    mutators = OF_TIFF if layout.entries else OF_TEXT if text else OF_HEADERS
    new, done = bytearray(old), []
    while bytes(new) == old:  # a number replaced by itself is no damage
        mutator = chance.choice(mutators)
        mutator(new, layout, chance)
        done.append(mutator.__name__)
    path.write_bytes(new)
    return done[-1], text or is_payload(old, bytes(new), layout)


def mutate_folder(folder: Path, chance: random.Random) -> tuple[str, bool]:
    """Damage one file of a Zarr store in place; as ``mutate_file``."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    about = [path for path in files if path.name.startswith((".z", "zarr.json"))]
    chunks = [path for path in files if path not in about]
    kind = chance.choice(("edit_json", "edit_json", "edit_json", "text", "remove", "remove_metadata", "chunk", "empty"))
    if kind == "edit_json":
        _edit_json(chance.choice(about), chance)
        return kind, False
    if kind == "text":
        path = chance.choice(about)
        data = bytearray(path.read_bytes())
        chance.choice((flip_anywhere, truncate, word))(data, Layout((), ()), chance)
        path.write_bytes(data)
        return kind, False
    target = chance.choice(about if kind == "remove_metadata" else chunks)
    if kind.startswith("remove"):
        target.unlink()
        return kind, False
    if kind == "empty":
        target.write_bytes(b"")
        return kind, False
    what, _ = mutate_file(target, layout_of(target), chance)
    return f"chunk {what}", what not in ("truncate", "insert")


def _edit_json(path: Path, chance: random.Random) -> None:
    """Replace, remove or repeat one value of a JSON file."""
    document = json.loads(path.read_text())
    holder, key = chance.choice(list(_places(document)))
    action = chance.choice(("replace", "replace", "replace", "remove", "deepen"))
    if action == "replace":
        holder[key] = chance.choice(JSON_VALUES)
    elif action == "remove":
        del holder[key]
    else:
        holder[key] = [holder[key], holder[key]]
    path.write_text(json.dumps(document))


def _edit_xml(path: Path, chance: random.Random) -> None:
    """Replace the value of an attribute, remove, repeat or rename an element, or declare entities."""
    text = path.read_text()
    action = chance.choice(("value", "value", "value", "remove", "repeat", "rename", "entities"))
    if action == "entities":
        name = chance.choice(("a", "lt", "x y"))
        entities = f'<!DOCTYPE x [<!ENTITY {name} SYSTEM "file:///etc/hostname"><!ENTITY b "&{name};&{name};">]>'
        start = text.index("?>") + 2
        path.write_text(text[:start] + entities + text[start:].replace('="', '="&b;', 1))
        return
    pattern = r'(?<==")[^"]*(?=")' if action == "value" else r"<[A-Z]\w*[^<>]*/?>"
    match = chance.choice(list(re.finditer(pattern, text)))
    new = {
        "value": str(chance.choice(XML_VALUES)),
        "remove": "",
        "repeat": match[0] * 2,
        "rename": f"<{chance.choice(('Polygon', 'Group', 'Region', 'x'))}{match[0].lstrip('<')[1:]}",
    }[action]
    path.write_text(text[: match.start()] + new + text[match.end() :])


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """(container, key) of every value below ``value``."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in pairs:
        yield value, key
        yield from _places(child)


def write_variant(seed: Path, layout: Layout | None, target: Path, chance: random.Random) -> tuple[str, bool]:
    """A damaged copy of ``seed`` as ``target``; as ``mutate_file``."""
    if seed.is_dir():
        shutil.copytree(seed, target)
        return mutate_folder(target, chance)
    shutil.copyfile(seed, target)
    assert layout is not None
    return mutate_file(target, layout, chance)
