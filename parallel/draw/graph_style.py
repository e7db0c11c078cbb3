"""Colours of a graph's picture, on light and on dark paper, and its words.

A stage has one colour for its boxes and for the wires that leave them. The picture follows the reader's setting.
"""

from __future__ import annotations

from html import escape

HUES = (
    ("#dbe9fa", "#1f66b1", "#16324f", "#5b9fe3"),
    ("#fde3c8", "#c25a0a", "#4f2c10", "#f0954a"),
    ("#d5eee6", "#157f64", "#123f34", "#46b895"),
    ("#ecdff5", "#7b42a8", "#38224a", "#b287d8"),
    ("#f8dbe1", "#b52c4b", "#4c1c28", "#e57f97"),
    ("#f3ecc4", "#8a7300", "#40380d", "#cdb53c"),
    ("#d4ecf1", "#1b7f93", "#123b44", "#4fb4c8"),
    ("#e4e6ea", "#566074", "#2d3340", "#98a3b8"),
)
"""(fill, line) of a stage on light and on dark paper; neighbours differ for colour-blind eyes too."""

INKS = {
    "ink": ("#1f2733", "#e8ebf0"),
    "pale": ("#5b6575", "#a3adbd"),
    "paper": ("#ffffff", "#14181f"),
    "line": ("#dde1e7", "#39414e"),
    "track": ("#ffffff", "#0b0e13"),
}


def style() -> str:
    """Colours on light paper, and on dark paper where the reader asks for it."""
    sheets = []
    for dark in (0, 1):
        rules = [f".{name}{{fill:{colours[dark]}}}" for name, colours in INKS.items()]
        rules += [f".edge{{stroke:{INKS['line'][dark]}}}", f".rule{{stroke:{INKS['ink'][dark]};fill:none}}"]
        rules.append(f".bracket{{stroke:{INKS['pale'][dark]};fill:none}}")
        for stage, hue in enumerate(HUES):
            fill, line = hue[2 * dark : 2 * dark + 2]
            rules.append(f".s{stage}{{fill:{fill};stroke:{line}}}.f{stage}{{fill:{line}}}")
            rules.append(f".w{stage}{{stroke:{line};fill:none}}")
        sheets.append("".join(rules))
    return f"{sheets[0]}@media (prefers-color-scheme:dark){{{sheets[1]}}}"


def svg_text(
    x: float, y: float, text: str, size: float, ink: str = "ink", anchor: str = "start", *, bold: bool = False
) -> str:
    """One line, nothing where there are no words; ``ink`` is a class of ``style``."""
    if not text:
        return ""
    weight = ' font-weight="600"' if bold else ""
    return (
        f'<text class="{ink}" x="{x:.1f}" y="{y:.1f}" font-size="{size:g}" text-anchor="{anchor}"{weight}>'
        f"{escape(text)}</text>"
    )
