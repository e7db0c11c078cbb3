"""The part of a box inside a level, against the plain way: one px at a time."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pipelines.backends.level_reader import pad
from pipelines.slides.slide import PADDING

edges = st.integers(-12, 25)
sizes = st.integers(1, 12)


@given(edges, edges, sizes, sizes, sizes, sizes)
def test_inside_is_left_alone_and_outside_is_white(
    l_x: int, l_y: int, width: int, height: int, l_width: int, l_height: int
) -> None:
    out = np.zeros((height, width, 3), np.uint8)
    inside = pad(out, l_x, l_y, l_width, l_height)
    within = np.array(
        [[0 <= l_x + x < l_width and 0 <= l_y + y < l_height for x in range(width)] for y in range(height)]
    )
    assert ((out == PADDING).all(axis=2) == ~within).all()
    if not within.any():
        assert inside is None
        return
    assert inside is not None
    assert inside.out.base is out
    inside.out[...] = 1
    assert ((out == 1).all(axis=2) == within).all()
    y, x = np.argwhere(within)[0]
    assert (inside.l_x, inside.l_y) == (l_x + x, l_y + y)
