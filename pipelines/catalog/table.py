"""CSV tables: those of a user, read by the role of their columns, and our own, ``failed_slides.csv`` among them.

A user's table has a header line, is separated by comma, semicolon or tab, with or without a byte-order mark; each row
keeps its line number for messages. In our own files a cell that a spreadsheet would run as a formula is marked as text.
"""

from __future__ import annotations

import contextlib
import csv
import io
import logging
import os
import re
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from pipelines.slides.slide import printable
from pipelines.slides.whole_files import lock

LABELS_FILE = "labels.csv"
"""A table of this name in the slides' folder is used without being asked for."""

DELIMITERS = ",;\t"

QUOTE = 'a double quote (") is not closed, or stands within a value; put quotes around the value, and "" for one in it'
"""What is wrong with a line of which no row can be made."""

ENCODINGS = {b"\xff\xfe": "utf-16", b"\xfe\xff": "utf-16"}
"""Byte-order marks that Excel writes for "Unicode text"; everything else is UTF-8, with or without its mark."""

ALIASES: Mapping[str, tuple[str, ...]] = {
    "slide": ("slide", "slide_id", "image", "filename"),
    "label": ("label", "class", "type"),
    "patient": ("patient", "patient_id", "case_id"),
    "mpp": ("mpp",),
    "split": ("split",),
    "site": ("site", "site_id", "center", "centre", "tissue_source_site"),
}
"""What a column may be called, by role; upper and lower case are the same. The first one found counts."""

MISSING = frozenset({"nan", "na", "n/a", "<na>", "#n/a", "none", "null", "-", "--"})
"""How pandas, R, databases and people write that there is no value; upper and lower case are the same."""

MAY_BE_MISSING = frozenset({"label", "patient", "site", "mpp"})
"""Roles whose ``MISSING`` values are read as empty cells. Slides may really be called so."""


@dataclass(frozen=True, slots=True)
class TableRow:
    """One line of a table: its number in the file (the header is 1) and its values by role, printable and without
    blanks around them; a missing value is empty."""

    line: int
    values: Mapping[str, str]

    def __getitem__(self, role: str) -> str:
        return self.values.get(role, "")


@dataclass(frozen=True, slots=True)
class Table:
    """The rows of a file, and which roles its columns have."""

    path: Path
    roles: frozenset[str]
    rows: tuple[TableRow, ...]


def read_table(path: Path, required: tuple[str, ...]) -> Table:
    """Read ``path``; empty lines are skipped.

    Raises:
        ValueError: no such file, not text, no rows, a required column is missing (names the columns found and the
            accepted names), a quote that is not closed, or lines with more values than columns.
    """
    parsed = read_cells(path)
    header = [printable(name.strip()) for name in next(parsed)[1]]
    columns = _columns(header)
    missing = [role for role in required if role not in columns]
    if missing:
        wanted = "; ".join(f"{role}: {' or '.join(ALIASES[role])}" for role in missing)
        raise ValueError(f"{path} lacks a column ({wanted}); its columns are: {', '.join(header)}. Rename or add it")
    rows: list[TableRow] = []
    too_long: list[str] = []
    for line, values in parsed:
        if len(values) > len(header) and any(v.strip() for v in values[len(header) :]):
            too_long.append(f"line {line} has {len(values)}")
        if any(v.strip() for v in values):
            cells = {role: values[i].strip() for role, i in columns.items() if i < len(values)}
            if any("\n" in cell for cell in cells.values()):
                raise ValueError(f"{path} line {line}: {QUOTE}")
            rows.append(TableRow(line, {role: _value(role, cell) for role, cell in cells.items()}))
    if too_long:
        raise ValueError(
            f"{path}: every line has as many values as the header, {len(header)}; {'; '.join(too_long[:5])}. "
            "Put values that contain the separator in double quotes"
        )
    if not rows:
        raise ValueError(f"{path} must name at least one slide; it has a header ({', '.join(header)}) and no lines")
    return Table(path, frozenset(columns), tuple(rows))


def _value(role: str, cell: str) -> str:
    return "" if role in MAY_BE_MISSING and cell.casefold() in MISSING else printable(cell)


def read_cells(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Yield the number of its first line, from 1, and the cells of every row of a table, the header's first.

    Raises:
        ValueError: no such file, not text, empty, or a quote that is not closed.
    """
    # Not splitlines: a form feed or a line separator of Unicode within a name ends no line of a CSV file.
    lines = list(io.StringIO(read_text(path), newline=None))
    header_at = next((i for i, line in enumerate(lines) if line.strip()), None)
    if header_at is None:
        raise ValueError(f"{path} must hold a table with a header line; it is empty")
    delimiter = max(DELIMITERS, key=lines[header_at].count)
    reader = csv.reader(lines[header_at:], delimiter=delimiter, strict=True)
    line = header_at + 1
    try:
        for values in reader:
            yield line, values
            line = header_at + reader.line_num + 1
    except csv.Error as fault:
        raise ValueError(f"{path} line {line}: {QUOTE} ({fault})") from fault


def _columns(header: list[str]) -> dict[str, int]:
    names = [name.casefold() for name in header]
    columns = {role: [names.index(a) for a in aliases if a in names] for role, aliases in ALIASES.items()}
    return {role: at[0] for role, at in columns.items() if at}


def read_text(path: Path) -> str:
    """Return the text of a user's file, with or without a byte-order mark.

    Raises:
        ValueError: it cannot be read, or is no text in UTF-8.
    """
    # A pipe would be waited for, and could be read only once.
    if path.exists() and not path.is_file() and not path.is_dir():
        raise ValueError(f"{path} must be a file: it is read more than once. Write the table into one")
    try:
        data = path.read_bytes()
    except OSError as fault:
        raise ValueError(f"{path} cannot be read: {fault.strerror or fault}. Check the path") from fault
    try:
        text = data.decode(ENCODINGS.get(data[:2], "utf-8-sig"))
    except UnicodeDecodeError as fault:
        line = data.count(b"\n", 0, fault.start) + 1
        raise ValueError(
            f"{path} must be a CSV text file in UTF-8; byte {fault.start}, in line {line}, is not. Save it as UTF-8"
        ) from fault
    if "\0" in text:
        line = text.count("\n", 0, text.index("\0")) + 1
        raise ValueError(f"{path} must be a CSV text file in UTF-8; line {line} has a NUL. Save it as UTF-8")
    return text


def shown(faults: Sequence[str], most: int = 8) -> str:
    """Faults for a message, a line each: the first ones, and how many more there are."""
    more = [f"and {len(faults) - most} more"] if len(faults) > most else []
    return "\n  ".join([*faults[:most], *more])


def listed(names: Sequence[str], most: int = 8) -> str:
    """Names for a message: the first ones, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def warn_of(logger: logging.Logger, what: str, names: Sequence[str], noun: str) -> None:
    """Log ``what`` is wrong with ``names``, each a ``noun``; nothing where there are none."""
    if names:
        logger.warning("%s: %s: %s", what, counted(len(names), noun), listed(names))


RUNS = re.compile(r"[=@\t\r\n]|[+-].*[(|!]", re.DOTALL)
"""Text that a spreadsheet would run (OWASP, "CSV Injection"); a sign alone begins a name or a number."""

MARKED = re.compile(r"'+[=+\-@\t\r\n]")
"""Text that would be taken for a marked one."""


def write_rows(file: TextIO, rows: Iterable[Sequence[object]]) -> None:
    """Write ``rows`` as CSV; None is an empty cell. A file is opened with ``newline=""``."""
    csv.writer(file, lineterminator="\n").writerows([as_text(cell) for cell in row] for row in rows)


def read_rows(lines: Iterable[str]) -> Iterator[dict[str, str]]:
    """Rows of a file of ours by column, below its header; a row cut short has empty cells."""
    for row in csv.DictReader(lines, restkey="", restval=""):
        yield {original(key): original(value) for key, value in row.items() if key}


def as_text(cell: object) -> object:
    """Return ``cell`` as it is written: with an apostrophe before what a spreadsheet would run."""
    is_marked = isinstance(cell, str) and (RUNS.match(cell) or MARKED.match(cell))
    return f"'{cell}" if is_marked else cell


def original(cell: str) -> str:
    """Return what ``as_text`` was given."""
    return cell[1:] if MARKED.match(cell) else cell


def counted(number: int, noun: str) -> str:
    """Return ``number`` and ``noun``, in the plural unless it is one."""
    plural = noun + ("es" if noun.endswith(("s", "x", "ch", "sh")) else "s")
    return f"{number} {noun if number == 1 else plural}"


COLUMNS = ("slide", "step", "error")


class FailedSlides:
    """The failures recorded at ``path``; the file appears with the first one, and stays with its header alone."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._written: set[tuple[str, str, str]] | None = None
        self._once = threading.Lock()

    def add_once(self, slide: str, step: str, error: str | BaseException) -> bool:
        """Append a failure unless its row was there when the first was added, or was added since; return whether not.
        For what fails again each time it is tried. Safe in threads."""
        row = (slide, step, _one_line(error))
        with self._once:
            if self._written is None:
                self._written = set(self.rows())
            if row in self._written:
                return False
            self.add(*row)
            self._written.add(row)
            return True

    def add(self, slide: str, step: str, error: str | BaseException) -> None:
        """Append one failure. Safe in threads and processes; a full disk raises ``OSError``.

        Args:
            slide: the slide's id.
            step: what was being done: open, tissue, tiles, read, ...
            error: message; line breaks become spaces, so that a row stays a line.
        """
        with names_file(self.path), self._locked() as descriptor:
            rows = [(slide, step, _one_line(error))]
            if os.fstat(descriptor).st_size == 0:
                rows.insert(0, COLUMNS)
            _write(descriptor, rows)

    def rows(self) -> list[tuple[str, str, str]]:
        """Return every failure, oldest first; none when there is no file. Safe while others add."""
        if not self.path.exists():
            return []
        # Read at once: of a file that was empty at first, csv would take the first failure for the header.
        text = self.path.read_bytes().decode(errors="surrogateescape")
        return [(row["slide"], row["step"], row["error"]) for row in read_rows(io.StringIO(text, newline=""))]

    def remove(self, slides: Collection[str], step: str | None = None) -> None:
        """Take out the failures of these slides, all or those at ``step``: they are about to be tried again."""
        if not self.path.exists():
            return
        with self._locked() as descriptor:
            kept = [row for row in self.rows() if row[0] not in slides or step not in (None, row[1])]
            os.ftruncate(descriptor, 0)
            _write(descriptor, [COLUMNS, *kept])

    @contextmanager
    def _locked(self) -> Iterator[int]:
        # One descriptor per use: flock excludes other descriptors, those of threads of this process included.
        # On a disk without locks, O_APPEND keeps two failures of one host apart.
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            lock(descriptor)
            yield descriptor
        finally:
            os.close(descriptor)


def _one_line(error: str | BaseException) -> str:
    return printable(" ".join((str(error) or type(error).__name__).split()))


def _write(descriptor: int, rows: Sequence[Sequence[str]]) -> None:
    text = io.StringIO()
    write_rows(text, rows)
    data = text.getvalue().encode(errors="surrogateescape")  # of a file name that is not UTF-8
    while data:
        data = data[os.write(descriptor, data) :]


@contextlib.contextmanager
def names_file(path: Path) -> Iterator[None]:
    """Let an ``OSError`` that names no file name ``path``."""
    try:
        yield
    except OSError as fault:
        if fault.filename is None:
            fault.filename = str(path)
        raise
