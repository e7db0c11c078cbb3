"""Draw timelines as SVG: a row for each rank, a box for each compute action, empty where the rank waits.

The file is self-contained, with its own background. Boxes are drawn as in the papers: the number is the microbatch, the
colour the replica, light for forward and dark for backward.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape
from typing import NamedTuple

from parallel.schedule.action import Kind
from parallel.schedule.timeline import Span, Timeline

LABELS, WIDTH, MARGIN = 76.0, 1000.0, 24.0
"""Width of the column of rank names, of the chart next to it, and of the space around, in px."""
ROW, GAP = 30.0, 5.0
"""Height of a row and of the space between two."""

FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
INK, PALE, PAPER, IDLE, LINE = "#1f2733", "#667085", "#ffffff", "#f1f3f6", "#dde1e7"


class Shade(NamedTuple):
    """Fill of a box and the colour of the number on it."""

    fill: str
    ink: str


KINDS = {
    Kind.FORWARD: ("forward", Shade("#a9cdf4", "#0d2f57"), Shade("#fbcf9d", "#5c2c00")),
    Kind.BACKWARD: ("backward", Shade("#1f66b1", "#ffffff"), Shade("#c25a0a", "#ffffff")),
    Kind.BACKWARD_INPUT: ("backward, inputs", Shade("#1f66b1", "#ffffff"), Shade("#c25a0a", "#ffffff")),
    Kind.BACKWARD_WEIGHT: ("backward, weights", Shade("#23828c", "#ffffff"), Shade("#8f6f00", "#ffffff")),
    Kind.RECOMPUTE: ("recompute", Shade("#e3eefb", "#0d2f57"), Shade("#fdeedd", "#5c2c00")),
    Kind.UPDATE: ("update", Shade("#1f2733", "#ffffff"), Shade("#1f2733", "#ffffff")),
}
"""Name, and shades in replicas 0 and 1: blue and orange stay apart for colour-blind eyes and in grey."""


def schedule_svg(
    timeline: Timeline, *, title: str, compare: Timeline | None = None, teams: Sequence[range] = ()
) -> str:
    """Return the text of an SVG file.

    Args:
        timeline: alone, or the simulated one when there is another to compare.
        compare: measured; drawn below on the same time scale.
        teams: ranks that compute each tile together; a line next to their rows joins them.
    """
    charts = [("", timeline)] if compare is None else [("simulated", timeline), ("measured", compare)]
    whole_s = max(chart.makespan_s for _, chart in charts) or 1.0
    scale = WIDTH / whole_s
    unit, per_s = _unit(whole_s)

    top = MARGIN + 22
    parts = [_text(MARGIN, top - 4, title, size=19, weight=600)]
    for name, chart in charts:
        top += 26
        facts = f"{chart.makespan_s * per_s:.4g} {unit}, bubble {chart.bubble:.1%}"
        parts.append(_text(MARGIN, top - 6, f"{name}: {facts}" if name else facts, size=14, fill=PALE))
        parts += _rows(chart, top + 4, scale)
        parts += [_joined(team, top + 4) for team in teams if len(team) > 1]
        top += 4 + len(chart.spans) * (ROW + GAP)
    parts += _axis(top, whole_s, unit, per_s)
    parts += _legend([chart for _, chart in charts], top + 52)
    height, width = top + 52 + MARGIN, MARGIN + LABELS + WIDTH + MARGIN
    sides = f'width="{width:g}" height="{height:g}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" {sides} role="img"'
    lines = [
        f'{head} font-family="{FONT}">',
        f"<title>{escape(title)}</title>",
        '<defs><pattern id="again" width="6" height="6" patternUnits="userSpaceOnUse" '
        'patternTransform="rotate(45)"><path d="M0 0V6" stroke="#000000" stroke-opacity="0.3" stroke-width="2"/>'
        "</pattern></defs>",
        f'<rect width="{width:g}" height="{height:g}" rx="10" fill="{PAPER}" stroke="{LINE}"/>',
        *parts,
        "</svg>\n",
    ]
    return "\n".join(lines)


def _joined(team: range, top: float) -> str:
    first, last = top + team.start * (ROW + GAP), top + (team.stop - 1) * (ROW + GAP) + ROW
    words = f"ranks {team.start} to {team.stop - 1} compute each tile together"
    return (
        f'<path d="M{MARGIN - 5:g} {first:g}H{MARGIN - 10:g}V{last:g}H{MARGIN - 5:g}" fill="none" stroke="{PALE}" '
        f'stroke-width="2"><title>{words}</title></path>'
    )


def _rows(timeline: Timeline, top: float, scale: float) -> Iterator[str]:
    left, width, start_s = MARGIN + LABELS, timeline.makespan_s * scale, timeline.start_s
    for row, rank in enumerate(sorted(timeline.spans)):
        y = top + row * (ROW + GAP)
        yield _text(MARGIN, y + ROW / 2 + 5, f"rank {rank}", size=14)
        yield f'<rect x="{left:g}" y="{y:g}" width="{width:.2f}" height="{ROW:g}" fill="{IDLE}"/>'
        chunks = _chunks(timeline, rank)
        for span in timeline.compute(rank):
            x = left + (span.start_s - start_s) * scale
            yield from _box(span, x, y, span.duration_s * scale, chunks[span.action.replica, span.action.stage])


def _chunks(timeline: Timeline, rank: int) -> dict[tuple[int, int], int]:
    """Return for each (replica, stage) of ``rank`` how many earlier stages of that replica it holds."""
    held = sorted({(span.action.replica, span.action.stage) for span in timeline.compute(rank)})
    return {place: sum(other[0] == place[0] for other in held[:n]) for n, place in enumerate(held)}


def _box(span: Span, x: float, y: float, width: float, chunk: int) -> Iterator[str]:
    _, *shades = KINDS[span.action.kind]
    shade = shades[span.action.replica]
    # A hair's breadth of paper between neighbours, so that boxes of one colour can be told apart.
    shown = max(width - 1.2, 0.6)
    yield f'<g class="action"><title>{span.action}</title>'
    yield f'<rect x="{x:.2f}" y="{y:g}" width="{shown:.2f}" height="{ROW:g}" rx="2.5" fill="{shade.fill}"/>'
    if span.action.kind is Kind.RECOMPUTE:
        yield f'<rect x="{x:.2f}" y="{y:g}" width="{shown:.2f}" height="{ROW:g}" rx="2.5" fill="url(#again)"/>'
    number = str(span.action.microbatch)
    if width >= 8 * len(number) + 3:
        yield _text(x + shown / 2, y + ROW / 2 + 5, number, size=14, fill=shade.ink, anchor="middle")
    for bar in range(chunk):
        path = f"M{x + 3:.2f} {y + ROW - 3 - 3 * bar:g}h{max(shown - 6, 0.6):.2f}"
        yield f'<path d="{path}" stroke="{shade.ink}" stroke-width="1.5" stroke-opacity="0.75"/>'
    yield "</g>"


def _axis(top: float, whole_s: float, unit: str, per_s: float) -> Iterator[str]:
    left = MARGIN + LABELS
    yield f'<path d="M{left:g} {top:g}H{left + WIDTH:g}" stroke="{PALE}"/>'
    step = _step(whole_s * per_s)
    for tick in range(math.floor(whole_s * per_s / step + 1e-9) + 1):
        x = left + tick * step / per_s * WIDTH / whole_s
        yield f'<path d="M{x:.2f} {top:g}v5" stroke="{PALE}"/>'
        yield _text(x, top + 19, f"{tick * step:.4g}", size=13, fill=PALE, anchor="middle")
    yield _text(MARGIN, top + 19, f"time, {unit}", size=13, fill=PALE)


def _legend(charts: list[Timeline], y: float) -> Iterator[str]:
    actions = [span.action for chart in charts for rank in chart.spans for span in chart.compute(rank)]
    replicas = sorted({action.replica for action in actions})
    x = MARGIN + LABELS
    if any(any(_chunks(chart, rank).values()) for chart in charts for rank in chart.spans):
        note = "a line under the number for each earlier chunk of the rank"
        yield _text(x + WIDTH, y + 1, note, size=13, fill=PALE, anchor="end")
    for replica in replicas:
        if len(replicas) > 1:
            yield _text(x, y + 1, f"replica {replica}:", size=13, fill=PALE)
            x += 68
        for kind, (name, *shades) in KINDS.items():
            if any(action.kind is kind and action.replica == replica for action in actions):
                fill = shades[replica].fill
                yield f'<rect x="{x:g}" y="{y - 12:g}" width="16" height="16" rx="2.5" fill="{fill}"/>'
                if kind is Kind.RECOMPUTE:
                    yield f'<rect x="{x:g}" y="{y - 12:g}" width="16" height="16" rx="2.5" fill="url(#again)"/>'
                yield _text(x + 22, y + 1, name, size=13)
                x += 22 + 6.6 * len(name) + 22


def _text(
    x: float, y: float, text: str, *, size: int, fill: str = INK, anchor: str = "start", weight: int = 400
) -> str:
    return (
        f'<text x="{x:.2f}" y="{y:.2f}" font-size="{size}" fill="{fill}" text-anchor="{anchor}" '
        f'font-weight="{weight}">{escape(text)}</text>'
    )


def _unit(whole_s: float) -> tuple[str, float]:
    """Return the unit in which the step time has one to three digits, and how many of it a second has."""
    return ("s", 1.0) if whole_s >= 1 else ("ms", 1e3) if whole_s >= 1e-3 else ("µs", 1e6)


def _step(whole: float) -> float:
    """Return the distance between ticks: 1, 2 or 5 times a power of ten, for eight to twenty ticks."""
    power = 10.0 ** math.floor(math.log10(whole / 8))
    return next(factor * power for factor in (5, 2, 1) if factor * power <= whole / 8)
