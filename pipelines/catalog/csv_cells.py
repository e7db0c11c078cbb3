"""Cells of the CSV files that we write: what a spreadsheet program would compute is marked as text.

Takes rows to a file, and rows from one; what is read is what was written. A name that begins with ``=``, ``+``, ``-``,
``@``, a tab or a carriage return is a formula to Excel and LibreOffice, and a formula can start programs (OWASP, "CSV
Injection"): an apostrophe goes before it, as it goes before every text that would be taken for such a marked one.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

FORMULA = re.compile(r"'*[=+\-@\t\r\n]")


class TextFile(Protocol):
    """What rows are written to."""

    def write(self, text: str, /) -> object: ...


def write_rows(file: TextFile, rows: Iterable[Sequence[object]]) -> None:
    """Write ``rows`` as CSV; None is an empty cell. A file is opened with ``newline=""``."""
    csv.writer(file, lineterminator="\n").writerows([as_text(cell) for cell in row] for row in rows)


def read_rows(lines: Iterable[str]) -> Iterator[dict[str, str]]:
    """Rows of a file of ours by column, below its header; a row cut short has empty cells."""
    for row in csv.DictReader(lines, restkey="", restval=""):
        yield {original(key): original(value) for key, value in row.items() if key}


def as_text(cell: object) -> object:
    """``cell`` as it is written. Numbers stay, also those that are texts: they compute nothing."""
    if not isinstance(cell, str) or FORMULA.match(cell) is None or _is_number(cell):
        return cell
    return "'" + cell


def original(cell: str) -> str:
    """Return what ``as_text`` was given."""
    return cell[1:] if cell.startswith("'") and FORMULA.match(cell) else cell


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return cell == cell.strip()
