"""The schedule timelines that rows name: the step as simulated above the step as measured, drawn into the page.

Takes rows and the folder of the benchmark; gives SVG. Of each model the tile and ranks with most of them are
shown, the others can be opened. A picture that is missing, torn or outside the folder is left out with a word.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

from app.pages.bench_file import Result
from app.pages.bench_groups import RowGroup
from app.pages.bench_panels import name_of


class Picture(NamedTuple):
    """A timeline with its heading; ``svg``: the drawing, None where ``file`` cannot be read."""

    title: str
    bubbles: Sequence[str]
    file: str
    svg: str | None


def timelines(row_groups: Sequence[RowGroup], folder: Path) -> tuple[list[Picture], list[Picture]]:
    """Return the pictures to be shown and those to be opened."""
    drawn = [(group, one) for group in row_groups for one in group.results if one.schedule_svg]
    counts = Counter((group.model, group.tile_px, group.ranks) for group, _ in drawn)
    fullest = {key[0]: key for key, _ in sorted(counts.items(), key=lambda entry: (entry[1], entry[0][1:]))}
    shown: list[Picture] = []
    folded: list[Picture] = []
    for number, (group, one) in enumerate(drawn):
        first = fullest[group.model] == (group.model, group.tile_px, group.ranks)
        (shown if first else folded).append(_timeline(one, group, folder, number))
    return shown, folded


def _timeline(one: Result, group: RowGroup, folder: Path, number: int) -> Picture:
    file = one.schedule_svg or ""
    bubbles = [
        f"{what} {100 * value:.1f} %"
        for what, value in (("bubble measured", one.bubble), ("predicted before the run", one.bubble_predicted))
        if value is not None
    ]
    title = f"{one.model}, {one.tile_px} px, {group.ranks_text}: {name_of(one)}"
    return Picture(title, bubbles, file, _picture(folder, file, f"p{number}"))


def _picture(folder: Path, name: str, prefix: str) -> str | None:
    """The SVG with identifiers of its own, so that pictures on one page do not use each other's patterns."""
    path = (folder / name).resolve()
    if not path.is_relative_to(folder.resolve()) or not path.is_file():
        return None
    text = path.read_text(encoding="utf-8", errors="replace")
    text = text[max(0, text.find("<svg")) :].strip()
    try:
        root = ElementTree.fromstring(text)
    except ElementTree.ParseError:
        return None
    if root.tag != "{http://www.w3.org/2000/svg}svg" or any(one.tag.endswith("script") for one in root.iter()):
        return None
    return re.sub(r'(\bid="|url\(#)', rf"\g<1>{prefix}-", text)
