"""Split a convolution of one member into its own part and boundary strips that need what other members have.

Takes the boxes of one exchange; returns the pads with which the own part alone gives all of the output, right but in
the strips, and the strips, which are computed a second time once the halos have arrived. Backward splits the input into
own part and halos; a convolution is linear in it.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from parallel.space.grid import Span
from parallel.space.rule import Window
from parallel.space.team import Box

MOST = 0.5
"""Of its output, in strips: beyond, one convolution of all that is needed is less work."""


def overlap_pays(map_size: int, weight_size: int) -> bool:
    """Return whether a convolution is better taken apart: each of its strips reads, and each gradient of a halo writes,
    the weights again, where putting all together copies a member's part of a tile. Both in bytes, or in numbers."""
    return map_size >= weight_size


@dataclass(frozen=True)
class BoundaryStrip:
    """Output that needs what others have.

    Attributes:
        made: its rows and columns.
        need: of the input, outside the map included.
        have: those that the map has.
    """

    made: Box
    need: Box
    have: Box


@dataclass(frozen=True)
class Halo:
    """Rows or columns of others, next to a member's own.

    Attributes:
        box: of the input.
        made: output that it is part of.
        pads: zeros (before, after) of rows and of columns with which it alone is an input for ``made``.
    """

    box: Box
    made: Box
    pads: tuple[tuple[int, int], tuple[int, int]]


@dataclass(frozen=True)
class Borders:
    """A convolution of a member's own part, and of what is around it.

    Attributes:
        base: of the input: what is needed of its own part.
        pads: rows, columns padded on both sides of ``base``.
        strips: apart from each other.
        halos: apart from each other and from ``base``; with it all that is needed.
    """

    base: Box
    pads: tuple[int, int]
    strips: tuple[BoundaryStrip, ...]
    halos: tuple[Halo, ...]


@functools.lru_cache(4096)
def borders(rules: tuple[Window, Window], made: Box, have: Box, own: Box, sides: tuple[int, int]) -> Borders | None:
    """Return how a convolution is taken apart; None where its own part is not padded alike on both sides, or is so
    small that it is mostly strips.

    Args:
        made: output of this member.
        have: input that it needs and the map has.
        own: input that it has.
        sides: of the whole input.
    """
    rows, columns = (_axis(rules[k], made[k], have[k], own[k], sides[k]) for k in (0, 1))
    if rows is None or columns is None:
        return None
    (base, top, bottom, pad), (base_columns, left, right, pad_columns) = rows, columns
    of_strips = (top.size + bottom.size) / made[0].size + (left.size + right.size) / made[1].size
    if of_strips > MOST:
        return None
    middle = Span(top.stop, bottom.start)
    strips = [(top, made[1]), (bottom, made[1]), (middle, left), (middle, right)]
    halos = [
        ((Span(have[0].start, base.start), have[1]), (top, made[1])),
        ((Span(base.stop, have[0].stop), have[1]), (bottom, made[1])),
        ((base, Span(have[1].start, base_columns.start)), (made[0], left)),
        ((base, Span(base_columns.stop, have[1].stop)), (made[0], right)),
    ]
    return Borders(
        (base, base_columns),
        (pad, pad_columns),
        tuple(_strip(rules, strip, sides) for strip in strips if strip[0].size and strip[1].size),
        tuple(_halo(rules, *halo, sides) for halo in halos if halo[0][0].size and halo[0][1].size),
    )


def _axis(rule: Window, made: Span, have: Span, own: Span, side: int) -> tuple[Span, Span, Span, int] | None:
    """(own part, strip before, strip after, pad) along one axis."""
    base = Span(max(have.start, own.start), min(have.stop, own.stop))
    if not base.size or rule.reach < rule.stride:
        return None
    pad = base.start - rule.need(made, side).start
    if (base.size + 2 * pad - rule.reach) // rule.stride + 1 != made.size:
        return None
    first = -(-(base.start + rule.before) // rule.stride) if have.start < base.start else made.start
    last = (base.stop + rule.before - rule.reach) // rule.stride + 1 if have.stop > base.stop else made.stop
    if not made.start <= first <= last <= made.stop:
        return None
    return base, Span(made.start, first), Span(last, made.stop), pad


def _strip(rules: tuple[Window, Window], made: Box, sides: tuple[int, int]) -> BoundaryStrip:
    need = rules[0].need(made[0], sides[0]), rules[1].need(made[1], sides[1])
    return BoundaryStrip(made, need, (need[0].within(sides[0]), need[1].within(sides[1])))


def _halo(rules: tuple[Window, Window], box: Box, made: Box, sides: tuple[int, int]) -> Halo:
    pads = []
    for k in (0, 1):
        need = rules[k].need(made[k], sides[k])
        pads.append((box[k].start - need.start, need.stop - box[k].stop))
    return Halo(box, made, (pads[0], pads[1]))
