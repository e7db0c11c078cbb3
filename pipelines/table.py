"""A user's table: a CSV file read by the role of its columns, whatever they are called.

Takes a file with a header line, comma, semicolon or tab separated, with or without a byte-order mark; gives rows with
the line number they stand on, so that every later message can name it. Labels, mpp and split files are such tables.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

DELIMITERS = ",;\t"

ENCODINGS = {b"\xff\xfe": "utf-16", b"\xfe\xff": "utf-16"}
"""Byte-order marks that Excel writes for "Unicode text"; everything else is UTF-8, with or without its mark."""

ALIASES: Mapping[str, tuple[str, ...]] = {
    "slide": ("slide", "slide_id", "image", "filename"),
    "label": ("label", "class", "type"),
    "patient": ("patient", "patient_id", "case_id"),
    "mpp": ("mpp",),
    "split": ("split",),
}
"""What a column may be called, by role; upper and lower case are the same. The first one found counts."""


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a table: its number in the file (the header is 1) and its values by role, blanks stripped."""

    line: int
    values: Mapping[str, str]

    def __getitem__(self, role: str) -> str:
        return self.values.get(role, "")


@dataclass(frozen=True, slots=True)
class Table:
    """The rows of a file, and which roles its columns have."""

    path: Path
    roles: frozenset[str]
    rows: tuple[Row, ...]


def read_table(path: Path, required: tuple[str, ...]) -> Table:
    """Read ``path``; empty lines are skipped.

    Args:
        path: CSV file.
        required: roles (keys of ``ALIASES``) that must have a column.

    Raises:
        ValueError: no such file, not text, no rows, a required column is missing (names the columns found and the
            accepted names), or lines with more values than columns.
    """
    lines = _read_text(path).splitlines()
    header_at = next((i for i, line in enumerate(lines) if line.strip()), None)
    if header_at is None:
        raise ValueError(f"{path} must hold a table with a header line; it is empty")
    delimiter = max(DELIMITERS, key=lines[header_at].count)
    reader = csv.reader(lines[header_at:], delimiter=delimiter)
    header = [name.strip() for name in next(reader)]
    columns = _columns(header)
    missing = [role for role in required if role not in columns]
    if missing:
        wanted = "; ".join(f"{role}: {' or '.join(ALIASES[role])}" for role in missing)
        raise ValueError(f"{path} lacks a column ({wanted}); its columns are: {', '.join(header)}. Rename or add it")
    rows: list[Row] = []
    too_long: list[str] = []
    for values in reader:
        line = header_at + reader.line_num
        if len(values) > len(header) and any(v.strip() for v in values[len(header) :]):
            too_long.append(f"line {line} has {len(values)}")
        if any(v.strip() for v in values):
            rows.append(Row(line, {r: values[i].strip() for r, i in columns.items() if i < len(values)}))
    if too_long:
        raise ValueError(
            f"{path}: every line has as many values as the header, {len(header)}; {'; '.join(too_long[:5])}. "
            "Put values that contain the separator in double quotes"
        )
    if not rows:
        raise ValueError(f"{path} must name at least one slide; it has a header ({', '.join(header)}) and no lines")
    return Table(path, frozenset(columns), tuple(rows))


def _columns(header: list[str]) -> dict[str, int]:
    names = [name.casefold() for name in header]
    found = {role: [names.index(a) for a in aliases if a in names] for role, aliases in ALIASES.items()}
    return {role: at[0] for role, at in found.items() if at}


def _read_text(path: Path) -> str:
    try:
        data = path.read_bytes()
        return data.decode(ENCODINGS.get(data[:2], "utf-8-sig"))
    except OSError as fault:
        raise ValueError(f"{path} cannot be read: {fault.strerror or fault}. Check the path") from fault
    except UnicodeDecodeError as fault:
        raise ValueError(
            f"{path} must be a CSV text file in UTF-8; byte {fault.start} is not. Save it as UTF-8"
        ) from fault


def listed(names: Sequence[str], most: int = 8) -> str:
    """Names for a message: the first ones, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
