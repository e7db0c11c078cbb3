"""Colours and text of pictures as SVG, on light and on dark paper: a picture follows the reader's setting.

Widths of text are those of Helvetica (Adobe font metrics), for boxes that hold their words.
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"

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


def svg_file(width: float, height: float, title: str, lines: Iterable[str]) -> str:
    """Return the text of a file whose picture, of so many px, is drawn by ``lines``."""
    sides = f'width="{width:g}" height="{height:g}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" {sides} role="img"'
    return "\n".join([f'{head} font-family="{FONT}">', f"<title>{escape(title)}</title>", *lines, "</svg>\n"])


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


NARROW, WIDER = 0.6, 1.1
"""Most characters that are not listed, as a part of the font size; factor for bold text and other system fonts."""

WIDTHS = {
    character: width
    for characters, width in (
        ("ijl'|", 222),
        ("ftI.,:;/!-()[] ·", 300),
        ('r"', 350),
        ("Jcksvxyz", 500),
        ("abdeghnopqu0123456789_L?", 556),
        ("FTZ+<>=~×–", 611),
        ("ABEKPSVXY&", 667),
        ("CDHNRUw", 722),
        ("GOQ", 778),
        ("mM", 833),
        ("W@%…", 1000),
    )
    for character in characters
}


def text_width(text: str, size: float) -> float:
    """Return the width of a line in px, rather too much than too little."""
    return WIDER * size * sum(WIDTHS.get(character, 1000 * NARROW) for character in text) / 1000


def fitted(text: str, size: float, width: float, *, keep_end: bool = False) -> str:
    """``text``, or as much of its beginning (of its end) as fits, with an ellipsis."""
    if text_width(text, size) <= width:
        return text
    while text and text_width(f"{text}…", size) > width:
        text = text[1:] if keep_end else text[:-1]
    return f"…{text}" if keep_end else f"{text.rstrip()}…"
