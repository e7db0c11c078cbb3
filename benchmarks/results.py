"""Results of a benchmark where its README has room for them: between two markers, written by the run alone.

Takes tables as rows of text; gives Markdown, and puts it into the README of the benchmark's folder.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks.machine import measured_on

BEGIN, END = "<!-- results: written by the run -->\n", "<!-- end of results -->"


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
