"""Command line and results of a benchmark: JSON in ``bench-data``, and tables between two markers of a README.

Takes tables as rows of text; gives Markdown, and puts it into the README of the benchmark's folder.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.machine import measured_on

OUT = Path(__file__).parents[1] / "bench-data"
BEGIN, END = "<!-- results: written by the run -->\n", "<!-- end of results -->"


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


def publish(script: str, text: str, write: bool, part: str = "") -> None:
    """Print ``text``, and with ``write`` put it into the README next to ``script``.

    Args:
        part: as for ``write_results``.
    """
    print(text)
    if write:
        write_results(Path(script).with_name("README.md"), text, part)


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table, columns padded so that it reads well as plain text too."""
    lines = [list(header), *map(list, rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    texts = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in lines
    ]
    return "\n".join([texts[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *texts[1:]]) + "\n"


def results(command: str, *parts: str) -> str:
    """``parts``, which are tables and paragraphs, with where, when and how they were measured."""
    return "\n".join([*parts, f"Written by `{command}`: {measured_on()}.\n"])


def write_results(readme: Path, text: str, part: str = "") -> None:
    """Put ``text`` between the markers of ``readme``; of its results of ``part``, where it has several."""
    of_part = f"results of {part}" if part else "results"
    opening, closing = BEGIN.replace("results", of_part), END.replace("results", of_part)
    before, begin, rest = readme.read_text().partition(opening)
    _, end, after = rest.partition(closing)
    assert begin, f"{readme} has no line {opening.strip()}"
    assert end, f"{readme} has no line {closing}"
    readme.write_text(f"{before}{opening}\n{text}\n{closing}{after}")
