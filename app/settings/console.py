"""Standard output: findings and tables, on a terminal or as aligned columns; a reader that leaves early, as ``head``.

Away from a terminal no line is cut or broken and no box is drawn, so that ``grep``, a log file and an e-mail show what
was found.
"""

from __future__ import annotations

import io
import os
import stat
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TextIO

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


class _Drained(io.FileIO):
    """A descriptor whose reader may go."""

    def write(self, data: ReadableBuffer) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            return memoryview(data).nbytes


@contextmanager
def ignore_broken_pipe() -> Iterator[None]:
    """While this lasts, writing to a closed pipe is no fault, for ``print`` and whatever else writes to the streams."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = map(_drained, before)
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        sys.stdout, sys.stderr = before


def _drained(stream: TextIO) -> TextIO:
    try:
        descriptor = stream.fileno()
    except (OSError, AttributeError, ValueError):  # no file at all, as where output is captured
        return stream
    mode = os.fstat(descriptor).st_mode
    if not (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)):
        return stream
    stream.flush()
    raw = _Drained(descriptor, "w", closefd=False)
    return io.TextIOWrapper(io.BufferedWriter(raw), stream.encoding, stream.errors, line_buffering=stream is sys.stderr)


COLOURS = {"ok": "green", "warning": "yellow", "FAULT": "bold red"}


NARROW = 14
"""Most characters of a column that is not broken on a terminal."""


@dataclass(frozen=True)
class Finding:
    """One thing looked at. FAULT: training would fail; warning: it may, or will be slow; note: good to know."""

    state: Literal["ok", "note", "warning", "FAULT"]
    name: str
    found: str


def print_findings(title: str, findings: Sequence[Finding]) -> None:
    print_table(title, ("", "", ""), [(one.state, one.name, one.found) for one in findings])


def print_table(title: str, headers: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print ``rows`` under ``headers`` (all empty: none) and ``title``; cells that name a state are coloured."""
    if sys.stdout.isatty():
        table = Table(title=Text(title), title_justify="left", show_header=any(headers), title_style="bold")
        table.box, table.pad_edge, table.padding = None, False, (0, 2, 0, 0)
        for number, header in enumerate(headers):
            widest = max(cell_len(row[number]) for row in (headers, *rows))
            table.add_column(header, overflow="fold", no_wrap=widest <= NARROW)  # the wide ones share what is left
        for row in rows:
            table.add_row(*(Text(cell, style=COLOURS.get(cell, "")) for cell in row))
        print()
        Console().print(table)
        return
    print(f"\n{title}")
    lines = [headers, *rows] if any(headers) else list(rows)
    widths = [max(cell_len(line[i]) for line in lines) for i in range(len(headers))]
    for line in lines:
        padded = (cell + " " * (width - cell_len(cell)) for cell, width in zip(line, widths, strict=True))
        print(("  " + "  ".join(padded)).rstrip(), flush=True)
