"""From the wires of a layout to SVG: lines with round corners, arrows, dots where a lane is tapped, and bytes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape
from itertools import pairwise

from parallel.draw.graph_places import Layout, Wire
from parallel.draw.graph_style import HUES, svg_text
from parallel.draw.outline import Outline
from parallel.draw.text_width import text_width
from parallel.units import bytes_text


def wire_strokes(layout: Layout, outline: Outline, stages: Sequence[int]) -> Iterator[str]:
    """All wires of a layout, with the bytes they carry where there is room; ``stages`` is the stage of each part."""
    bytes_of: dict[int, int] = {}
    for link in outline.links:
        bytes_of[link.source] = max(bytes_of.get(link.source, 0), link.bytes)
    most = max(bytes_of.values(), default=0) or 1
    level = _crossings(layout)
    for wire in layout.wires:
        hue, size = stages[wire.source] % len(HUES), bytes_of[wire.source]
        width = 1.0 + 2.2 * math.sqrt(size / most)
        dash = "" if size else ' stroke-dasharray="2 3"'
        yield f'<path class="w{hue}" d="{_rounded(wire)}" stroke-width="{width:.1f}" stroke-linejoin="round"{dash}/>'
        if wire.dot:
            x, y = wire.points[0]
            yield f'<circle class="f{hue}" cx="{x:.1f}" cy="{y:.1f}" r="3"/>'
        if wire.arrow:
            yield f'<path class="f{hue}" d="{_arrow(wire)}"/>'
        if wire.kind == "trunk" and size:
            x, y = wire.points[0]
            begin = x - 7 - text_width(bytes_text(size), 10)
            if not any(y < across < y + 19 and left < x - 1 and right > begin for across, left, right in level):
                yield svg_text(x - 7, y + 14.5, bytes_text(size), 10, "pale", "end")
        if wire.kind == "lane" and size:
            yield from _lane_words(wire, bytes_text(size), level)


def _rounded(wire: Wire) -> str:
    """Corners of a small radius; the line stops short under an arrow."""
    points = list(wire.points)
    if wire.arrow:
        (ax, ay), (bx, by) = points[-2:]
        length = math.hypot(bx - ax, by - ay) or 1.0
        points[-1] = (bx - 4 * (bx - ax) / length, by - 4 * (by - ay) / length)
    path = [f"M{points[0][0]:.1f} {points[0][1]:.1f}"]
    for before, corner, after in zip(points, points[1:], points[2:], strict=False):
        radius = min(5.0, math.dist(before, corner) / 2, math.dist(corner, after) / 2)
        if radius < 0.05:
            continue
        start = _towards(corner, before, radius)
        end = _towards(corner, after, radius)
        path.append(f"L{start[0]:.1f} {start[1]:.1f}Q{corner[0]:.1f} {corner[1]:.1f} {end[0]:.1f} {end[1]:.1f}")
    path.append(f"L{points[-1][0]:.1f} {points[-1][1]:.1f}")
    return "".join(path)


def _towards(start: tuple[float, float], end: tuple[float, float], length: float) -> tuple[float, float]:
    whole = math.dist(start, end)
    return start[0] + (end[0] - start[0]) * length / whole, start[1] + (end[1] - start[1]) * length / whole


def _arrow(wire: Wire) -> str:
    (ax, ay), (x, y) = wire.points[-2:]
    if abs(x - ax) > abs(y - ay):
        back = 7.0 if x < ax else -7.0
        return f"M{x:.1f} {y:.1f}l{back:g} -3.6v7.2z"
    return f"M{x:.1f} {y:.1f}l-3.6 -7h7.2z"


def _crossings(layout: Layout) -> list[tuple[float, float, float]]:
    """(y, left, right) of all that runs level."""
    bounds = [(band.top, band.left, band.right) for band in layout.bands]
    for wire in layout.wires:
        for (ax, ay), (bx, by) in pairwise(wire.points):
            if ay == by:
                bounds.append((ay, min(ax, bx), max(ax, bx)))
    return bounds


def _lane_words(wire: Wire, words: str, level: Sequence[tuple[float, float, float]]) -> Iterator[str]:
    """Upright beside the longest free piece of the lane, where one is long enough."""
    x, top, bottom = max(
        ((a[0], min(a[1], b[1]), max(a[1], b[1])) for a, b in pairwise(wire.points) if a[0] == b[0]),
        key=lambda piece: piece[2] - piece[1],
    )
    stops = sorted(
        {top, bottom, *(y for y, left, right in level if left < x - 1 and right > x - 12 and top < y < bottom)}
    )
    free, begin = max(((b - a, a) for a, b in pairwise(stops)), default=(0.0, 0.0))
    if free >= text_width(words, 9.5) + 8:
        place = f"translate({x - 4:.1f} {begin + free / 2:.1f}) rotate(-90)"
        yield f'<text class="pale" transform="{place}" font-size="9.5" text-anchor="middle">{escape(words)}</text>'
