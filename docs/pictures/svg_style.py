"""Colours and text of these pictures, on light and on dark paper as the reader prefers."""

from __future__ import annotations

from html import escape

from parallel.draw.graph_text import HUES

DARK_HUES = (
    ("#16324f", "#5b9fe3"),
    ("#4f2c10", "#f0954a"),
    ("#123f34", "#46b895"),
    ("#38224a", "#b287d8"),
    ("#4c1c28", "#e57f97"),
    ("#40380d", "#cdb53c"),
    ("#123b44", "#4fb4c8"),
    ("#2d3340", "#98a3b8"),
)
"""``HUES`` on dark paper."""

INKS = {
    "ink": ("#1f2733", "#e8ebf0"),
    "pale": ("#5b6575", "#a3adbd"),
    "paper": ("#ffffff", "#14181f"),
    "line": ("#dde1e7", "#39414e"),
    "track": ("#ffffff", "#0b0e13"),
}


def style() -> str:
    """Return the rules for light paper, and for dark paper if the reader prefers it."""
    sheets = []
    for dark, hues in enumerate((HUES, DARK_HUES)):
        rules = [f".{name}{{fill:{colours[dark]}}}" for name, colours in INKS.items()]
        rules.append(f".edge{{stroke:{INKS['line'][dark]}}}")
        rules.append(f".bracket{{stroke:{INKS['pale'][dark]};fill:none}}")
        for number, (fill, line) in enumerate(hues):
            rules.append(f".s{number}{{fill:{fill};stroke:{line}}}.f{number}{{fill:{line}}}")
            rules.append(f".w{number}{{stroke:{line};fill:none}}")
        sheets.append("".join(rules))
    return f"{sheets[0]}@media (prefers-color-scheme:dark){{{sheets[1]}}}"


def svg_text(
    x: float, y: float, text: str, size: float, ink: str = "ink", anchor: str = "start", *, bold: bool = False
) -> str:
    """Return one line of text; ``ink`` is a class of ``style``."""
    weight = ' font-weight="600"' if bold else ""
    return (
        f'<text class="{ink}" x="{x:.1f}" y="{y:.1f}" font-size="{size:g}" text-anchor="{anchor}"{weight}>'
        f"{escape(text)}</text>"
    )
