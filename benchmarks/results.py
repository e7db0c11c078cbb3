"""Command line, JSON rows and tables of a benchmark.

Takes rows; keeps them as JSON in ``bench-data``, prints a Markdown table, and with ``--write`` puts it between two
markers of the README in the benchmark's folder.
"""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import statistics
import sys
from collections.abc import Iterable, Sequence
from datetime import date
from pathlib import Path
from typing import Any, NoReturn

import torch

from app.launch.host import usable_cores
from parallel.profile.cache import cpu_model

ROOT = Path(__file__).parents[1]
OUT = ROOT / "bench-data"


def measured_on() -> str:
    """Return date, processor, cores, Python and torch as one line."""
    return (
        f"{date.today().isoformat()}, {cpu_model()}, {usable_cores()} cores, Python {platform.python_version()}, "
        f"torch {torch.__version__}"
    )


def parser_of(doc: str | None, *, writes: bool = True) -> argparse.ArgumentParser:
    """Return a parser whose help is ``doc``.

    Args:
        writes: add ``--write``, which puts the tables into README.md.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    if writes:
        parser.add_argument("--write", action="store_true", help="put the tables into README.md")
    return parser


def write_json(name: str, result: Any) -> None:
    """Write ``result`` as ``bench-data/NAME.json``."""
    OUT.mkdir(exist_ok=True)
    (OUT / f"{name}.json").write_text(json.dumps(result, indent=2) + "\n")


def read_json(name: str) -> Any:
    """Return what ``bench-data/NAME.json`` holds; {} if there is no such file."""
    path = OUT / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else {}


def publish(script: str, text: str, write: bool, part: str = "", page: str = "README.md") -> None:
    """Print ``text``; with ``write`` put it between the markers of ``part`` on a page next to ``script``."""
    print(text, flush=True)
    if write:
        write_results(Path(script).with_name(page), text, part)


def finish(missed: Iterable[str]) -> NoReturn:
    """Print the targets that were missed and end with exit code 1, or with 0 if there are none."""
    lines = list(missed)
    print("\n".join(["missed:", *lines]) if lines else "all targets were reached")
    sys.exit(bool(lines))


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table whose columns are padded to one width."""
    lines = [list(header), *map(list, rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    texts = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in lines
    ]
    return "\n".join([texts[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *texts[1:]]) + "\n"


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Return the median and the range of ``values`` as text."""
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f}-{max(values):.{digits}f})"


def results(*parts: str) -> str:
    """Return ``parts``, which are tables and paragraphs, with the command that was typed, the date and the machine."""
    command = shlex.join(["python", *sys.orig_argv[1:]])
    return "\n".join([*parts, f"Written by `{command}`: {measured_on()}.\n"])


def write_results(readme: Path, text: str, part: str = "") -> None:
    """Put ``text`` between the markers of ``readme``, or between those of ``part`` if the page has several tables."""
    of_part = f"results of {part}" if part else "results"
    opening, closing = f"<!-- {of_part}: written by the run -->\n", f"<!-- end of {of_part} -->"
    before, begin, rest = readme.read_text().partition(opening)
    _, end, after = rest.partition(closing)
    assert begin, f"{readme} has no line {opening.strip()}"
    assert end, f"{readme} has no line {closing}"
    readme.write_text(f"{before}{opening}\n{text}\n{closing}{after}")
