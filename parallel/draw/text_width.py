"""How wide a text is in px, before any browser has drawn it: for boxes that hold their words.

Widths of Helvetica (Adobe font metrics), in thousandths of the font size, a little more for wider system fonts.
"""

from __future__ import annotations

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
    """Of one line in px, rather too much than too little."""
    return WIDER * size * sum(WIDTHS.get(character, 1000 * NARROW) for character in text) / 1000


def fitted(text: str, size: float, width: float, *, keep_end: bool = False) -> str:
    """``text``, or as much of its beginning (of its end) as fits, with an ellipsis."""
    if text_width(text, size) <= width:
        return text
    while text and text_width(f"{text}…", size) > width:
        text = text[1:] if keep_end else text[:-1]
    return f"…{text}" if keep_end else f"{text.rstrip()}…"
