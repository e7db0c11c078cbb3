"""The part of a box that lies inside a level; the rest is painted white.

Takes a box of a level (origin, and the array it is to fill) and the level's size; gives the inner part of the array and
where it starts in the level, so that a backend only ever reads pixels that exist.
"""

from __future__ import annotations

from typing import NamedTuple

from pipelines.slides.slide import PADDING, Pixels


class Inside(NamedTuple):
    """``out`` is a view of the caller's array, never empty; its top left is px (l_x, l_y) of the level."""

    l_x: int
    l_y: int
    out: Pixels


def pad(out: Pixels, l_x: int, l_y: int, l_width: int, l_height: int) -> Inside | None:
    """Paint what of ``out`` lies outside the level; give what lies inside, None when nothing does.

    Args:
        out: uint8 (h, w, 3), whose top left is px (l_x, l_y) of the level.
        l_x, l_y: may be negative or past the end.
        l_width, l_height: size of the level in px.
    """
    rows, columns = out.shape[:2]
    left, top = min(max(0, -l_x), columns), min(max(0, -l_y), rows)
    right, bottom = max(left, min(columns, l_width - l_x)), max(top, min(rows, l_height - l_y))
    out[:top] = PADDING
    out[bottom:] = PADDING
    out[top:bottom, :left] = PADDING
    out[top:bottom, right:] = PADDING
    if left == right or top == bottom:
        return None
    return Inside(l_x + left, l_y + top, out[top:bottom, left:right])
