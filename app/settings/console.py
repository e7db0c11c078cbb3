"""Findings of checks, and tables on a terminal or as aligned columns elsewhere.

Takes rows of text; prints them to standard output. Away from a terminal no line is cut or broken and no box is drawn,
so that ``grep``, a log file and an e-mail show what was found.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

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
