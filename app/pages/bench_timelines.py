"""The schedule timelines that rows name: the step as simulated above the step as measured, drawn into the page.

Takes rows and the folder of the benchmark; gives HTML. Of each model the tile and ranks with most of them are
shown, the others can be opened. A picture that is missing, torn or outside the folder is left out with a word.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from html import escape
from pathlib import Path
from xml.etree import ElementTree

from app.pages.bench_file import Result
from app.pages.bench_groups import RowGroup

STYLE = """
.timelines section { break-inside: avoid; } .timelines h3 { margin: 18px 0 2px; }
.timelines details { margin: 12px 0; } .timelines summary { cursor: pointer; }
.timelines .timeline { border-radius: 10px; }
"""


def timelines(found: Sequence[RowGroup], folder: Path) -> str:
    """All pictures; empty where no row has one."""
    drawn = [(group, one) for group in found for one in group.results if one.schedule_svg]
    counts = Counter((group.model, group.tile_px, group.ranks) for group, _ in drawn)
    fullest = {key[0]: key for key, _ in sorted(counts.items(), key=lambda entry: (entry[1], entry[0][1:]))}
    shown: list[str] = []
    folded: list[str] = []
    for number, (group, one) in enumerate(drawn):
        first = fullest[group.model] == (group.model, group.tile_px, group.ranks)
        (shown if first else folded).append(_timeline(one, group, folder, number))
    if not drawn:
        return ""
    note = (
        '<p class="soft">A row is a rank, a box a microbatch on its way forward (light) or backward (dark); grey is '
        "waiting. Above as simulated from the stage times of the same step, below as measured.</p>"
    )
    more = (
        f"<details><summary>{len(folded)} more, of other tiles and ranks</summary>{''.join(folded)}</details>"
        if folded
        else ""
    )
    return f'<div class="timelines">{note}{"".join(shown)}{more}</div>'


def _timeline(one: Result, group: RowGroup, folder: Path, number: int) -> str:
    """A heading, the bubble in words, and the picture."""
    title = f"<h3>{escape(f'{one.model}, {one.tile_px} px, {group.ranks_text}: {one.strategy}')}</h3>"
    picture = _picture(folder, one.schedule_svg or "", f"p{number}")
    if picture is None:
        missing = f"Its picture, {one.schedule_svg}, cannot be read."
        return f'<section>{title}<p class="none">{escape(missing)}</p></section>'
    told = [
        f"{what} {100 * value:.1f} %"
        for what, value in (("bubble measured", one.bubble), ("predicted before the run", one.bubble_predicted))
        if value is not None
    ]
    line = f'<p class="soft">{escape(", ".join(told))}</p>' if told else ""
    return f'<section>{title}{line}<div class="timeline">{picture}</div></section>'


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
