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
        for header in headers:
            table.add_column(header, overflow="fold")
        for row in rows:
            table.add_row(*(Text(cell, style=COLOURS.get(cell, "")) for cell in row))
        Console().print(table)
        return
    print(f"\n{title}")
    lines = [headers, *rows] if any(headers) else list(rows)
    widths = [max(cell_len(line[i]) for line in lines) for i in range(len(headers))]
    for line in lines:
        padded = (cell + " " * (width - cell_len(cell)) for cell, width in zip(line, widths, strict=True))
        print(("  " + "  ".join(padded)).rstrip(), flush=True)
