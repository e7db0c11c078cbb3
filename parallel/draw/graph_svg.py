"""Draw a model's graph as SVG: parts as boxes, values as wires, cuts as lines with the bytes over them.

The file is self-contained, for reports and web pages; it follows the reader's light or dark setting. A box has the
colour of its stage; the bar in it is its share of the time, light for forward and dark for backward, or of the bytes
saved for backward where no times are known. The wider a wire, the more bytes it carries.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape
from itertools import pairwise

from parallel.draw.graph_layout import BOX_HEIGHT, Band, Box, Layout, Wire, lay_out
from parallel.draw.outline import ModelView, Part
from parallel.draw.svg_style import HUES, fitted, style, svg_file, svg_text, text_width
from parallel.graph.layers import INPUT, OUTPUT
from parallel.units import bytes_text, seconds_text

MARGIN, HEAD = 24.0, 84.0
"""Space around, and above the boxes for title and legend, in px."""
NARROWEST, WIDEST = 168.0, 296.0
"""Of the boxes, in px; within these as their words need it."""
STAGE_WORDS, GROUP_WORDS = 116.0, 26.0
"""Width left of a column for what is said of stages, and for brackets around groups of parts."""
ROWS, SHAPE = 16, 1.5
"""Rows before the picture is folded, and width by height that a larger one is folded to."""


def graph_svg(view: ModelView) -> str:
    """Return the text of an SVG file."""
    box_width = _box_width(view.parts)
    margin = (STAGE_WORDS if view.partition else 0.0) + (GROUP_WORDS if view.groups else 0.0)
    rows = max(ROWS, round(math.sqrt(len(view.parts) * (1.6 * box_width + margin) / (BOX_HEIGHT + 26) / SHAPE)))
    layout = lay_out(view, box_width=box_width, margin=margin, top=HEAD, column_rows=rows)

    parts = [*_bands(layout, view)] if view.partition else []
    parts += [*wire_strokes(layout, view), *_boxes(layout, view), *_groups(layout, view)]
    legend, legend_width = _legend(view)
    width = max(layout.width, legend_width, text_width(view.title, 19)) + 2 * MARGIN
    height = layout.height + 2 * MARGIN
    lines = [
        f"<style>{style()}</style>",
        f'<rect class="paper edge" width="{width:g}" height="{height:g}" rx="10"/>',
        f'<g transform="translate({MARGIN:g} {MARGIN:g})">',
        svg_text(0, 18, view.title, 19, bold=True),
        *legend,
        *filter(None, parts),
        "</g>",
    ]
    return svg_file(width, height, view.title, lines)


def _box_width(parts: Sequence[Part]) -> float:
    needed = [
        max(
            text_width(part.name, 13) * 1.06 + 12 + text_width(part.kind, 11),
            text_width(_sizes(part), 11) + 12 + text_width(_time(part), 11),
        )
        for part in parts
    ]
    return min(max(NARROWEST, *needed) + 18, WIDEST) if needed else NARROWEST


def _sizes(part: Part) -> str:
    return " · ".join(part.sizes) or (bytes_text(part.output_bytes) if part.output_bytes else "")


def _time(part: Part) -> str:
    return seconds_text(part.seconds) if part.seconds else ""


def _shares(parts: Sequence[Part]) -> list[tuple[float, float]]:
    """Return the two pieces of each part's bar, as shares of the longest bar."""
    timed = [((part.forward_s or 0.0), (part.backward_s or 0.0)) for part in parts]
    pairs = timed if any(sum(pair) for pair in timed) else [(float(part.saved_bytes), 0.0) for part in parts]
    longest = max((sum(pair) for pair in pairs), default=0.0) or 1.0
    return [(first / longest, second / longest) for first, second in pairs]


def _boxes(layout: Layout, view: ModelView) -> Iterator[str]:
    shares = _shares(view.parts)
    for box in layout.boxes:
        part, hue = view.parts[box.number], view.stage_of[box.number] % len(HUES)
        inner = box.width - 16
        name = fitted(part.name, 13 * 1.06, inner, keep_end=True)
        room = inner - text_width(name, 13 * 1.06) - 10
        kind = fitted(part.kind, 11, room) if room > 0.8 * text_width(part.kind, 11) and part.kind != part.name else ""
        place = f'x="{box.x:.1f}" y="{box.y:.1f}" width="{box.width:.1f}" height="{BOX_HEIGHT:g}"'
        yield f'<g class="part"><title>{escape(_hover(part))}</title>'
        yield f'<rect class="s{hue}" {place} rx="5"/>'
        yield svg_text(box.x + 8, box.y + 16, name, 13, bold=True)
        yield svg_text(box.x + box.width - 8, box.y + 16, kind, 11, "pale", "end")
        time = _time(part)
        sizes = fitted(_sizes(part), 11, inner - text_width(time, 11) - (8 if time else 0))
        yield svg_text(box.x + 8, box.y + 31, sizes, 11, "pale")
        yield svg_text(box.x + box.width - 8, box.y + 31, time, 11, "ink", "end")
        yield from _bar(box, hue, shares[box.number])
        yield "</g>"


def _bar(box: Box, hue: int, share: tuple[float, float]) -> Iterator[str]:
    x, y, whole = box.x + 8, box.y + BOX_HEIGHT - 6.5, box.width - 16
    yield f'<rect class="track" x="{x:.1f}" y="{y:.1f}" width="{whole:.1f}" height="3" fill-opacity="0.6"/>'
    first, second = share[0] * whole, share[1] * whole
    if first >= 0.05:
        opacity = ' fill-opacity="0.5"' if second else ""
        yield f'<rect class="f{hue}" x="{x:.1f}" y="{y:.1f}" width="{first:.1f}" height="3"{opacity}/>'
    if second >= 0.05:
        yield f'<rect class="f{hue}" x="{x + first:.1f}" y="{y:.1f}" width="{second:.1f}" height="3"/>'


def _hover(part: Part) -> str:
    words = [part.name, part.kind, f"gives {bytes_text(part.output_bytes)}", _sizes(part)]
    for name, seconds in (("forward", part.forward_s), ("backward", part.backward_s)):
        words += [f"{name} {seconds_text(seconds)}"] if seconds else []
    return "\n".join(words)


def _bands(layout: Layout, view: ModelView) -> Iterator[str]:
    """Draw a strip in the stage's colour left of the boxes, its sums, and the cut that it begins with."""
    cuts = [*view.cuts.values()]
    for band in layout.bands:
        hue = band.stage % len(HUES)
        x = band.left + STAGE_WORDS - 10
        top = band.top + (5 if band.begins and band.stage else 0)
        height = max(band.bottom - 5 - top, 4)
        yield f'<rect class="f{hue}" x="{x:.1f}" y="{top:.1f}" width="5" height="{height:.1f}" rx="2.5"/>'
        yield from _stage_words(band, view.stage_sums[band.stage], top, x - 8)
        if band.begins and band.stage:
            cut = cuts[band.stage - 1]
            path = f"M{band.left:.1f} {band.top:.1f}H{band.right:.1f}"
            yield f'<path class="rule cut" d="{path}" stroke-dasharray="7 4" stroke-width="1.3"/>'
            yield svg_text(band.left, band.top - 6, f"cut: {bytes_text(cut.bytes)}", 12, bold=True)


def _stage_words(band: Band, total: Part, top: float, right: float) -> Iterator[str]:
    lines = [f"stage {band.stage}"]
    if band.begins:
        lines += [seconds_text(total.seconds)] if total.seconds else []
        lines += [f"{bytes_text(total.param_bytes)} params", f"{bytes_text(total.saved_bytes)} saved"]
    for k, line in enumerate(lines):
        yield svg_text(right, top + 12 + 13.5 * k, line, 12 if not k else 11, "pale" if k else "ink", "end", bold=not k)


def _groups(layout: Layout, view: ModelView) -> Iterator[str]:
    """Draw a bracket around the parts of each group, in each column."""
    boxes = {box.number: box for box in layout.boxes}
    for group in view.groups:
        columns: dict[int, list[Box]] = {}
        for number in range(group.first, group.last + 1):
            columns.setdefault(boxes[number].column, []).append(boxes[number])
        tallest = max(columns, key=lambda column: len(columns[column]))
        for number, column in columns.items():
            x = min(box.x for box in column) - 7
            top, bottom = min(box.y for box in column), max(box.y + BOX_HEIGHT for box in column)
            yield f'<path class="bracket" d="M{x + 3:.1f} {top:.1f}h-4v{bottom - top:.1f}h4"/>'
            # In the longest piece that no cut runs through.
            stops = [top, *sorted({band.top for band in layout.bands if top < band.top < bottom}), bottom]
            low, high = max(pairwise(stops), key=lambda piece: piece[1] - piece[0])
            words = fitted(group.label, 11, high - low, keep_end=True)
            if words != group.label and number != tallest:
                continue
            place = f"translate({x - 5:.1f} {(low + high) / 2:.1f}) rotate(-90)"
            yield f'<text class="pale" transform="{place}" font-size="11" text-anchor="middle">{escape(words)}</text>'


def _legend(view: ModelView) -> tuple[list[str], float]:
    sums = view.stage_sums
    params, saved = sum(total.param_bytes for total in sums), sum(total.saved_bytes for total in sums)
    count = sum(part.kind not in (INPUT, OUTPUT) for part in view.parts)
    parts = f"{count} {'operations' if view.level == 'op' else f'{view.level}s'}"
    words = [
        f"{parts} of {len(view.graph.layers)} layers",
        f"{bytes_text(params)} params",
        f"{bytes_text(saved)} saved",
    ]
    seconds = [total.seconds for total in sums if total.seconds]
    words += [f"{seconds_text(sum(seconds))} forward and backward"] if seconds else []
    timed = any(part.seconds for part in view.parts)
    bar = "share of the time, light forward, dark backward" if timed else "share of the bytes saved for backward"
    notes = [f"bar: {bar}", "wires: the wider, the more bytes", *(["colour: stage"] if view.partition else [])]
    lines = [" · ".join(words), " · ".join(notes)]
    texts = [svg_text(0, 40, lines[0], 13, "pale"), svg_text(0, 58, lines[1], 12, "pale")]
    return texts, max(text_width(line, 13) for line in lines)


def wire_strokes(layout: Layout, view: ModelView) -> Iterator[str]:
    """Draw all wires of a layout, with the bytes they carry where there is room."""
    bytes_of: dict[int, int] = {}
    for link in view.links:
        bytes_of[link.source] = max(bytes_of.get(link.source, 0), link.bytes)
    most = max(bytes_of.values(), default=0) or 1
    level = _crossings(layout)
    for wire in layout.wires:
        hue, size = view.stage_of[wire.source] % len(HUES), bytes_of[wire.source]
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
    """Return the path with round corners; it stops short under an arrow."""
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
    bounds = [(band.top, band.left, band.right) for band in layout.bands]
    for wire in layout.wires:
        for (ax, ay), (bx, by) in pairwise(wire.points):
            if ay == by:
                bounds.append((ay, min(ax, bx), max(ax, bx)))
    return bounds


def _lane_words(wire: Wire, words: str, level: Sequence[tuple[float, float, float]]) -> Iterator[str]:
    """Upright next to the longest free piece of the lane, where one is long enough."""
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
