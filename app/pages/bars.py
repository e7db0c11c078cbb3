"""Bars with their names and values as text: one line per strategy, read by eye, by screen reader and without colour.

Takes names, amounts on one scale, ranges and marks; gives a list. Only the bar itself is a drawing, stretched to the
room there is: names, values and reasons are text of the page, which breaks and grows as the reader's screen asks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

THICK = 18.0
"""Height of a bar, in px; several bars of one line share twice that at most."""

AIR = 1.06
"""The scale ends this much beyond the largest amount: a range or a line at the very end is seen whole."""

STYLE = """
.bars h4 { margin: 16px 0 4px; font-size: 14px; font-weight: 600; break-after: avoid; }
.bars h4 span { font-weight: 400; color: var(--soft); margin-left: 8px; } .bars figcaption + h4 { margin-top: 6px; }
.bars ol { list-style: none; margin: 0; padding: 0; font-size: 14px; }
.bars ol li { display: grid; grid-template: minmax(27px, auto) / minmax(90px, 29%) 1fr minmax(140px, 27%); gap: 0 12px;
  align-items: center; break-inside: avoid; }
.bars ol .name { overflow-wrap: anywhere; line-height: 1.25; }
.bars ol .value { font-variant-numeric: tabular-nums; line-height: 1.3; padding: 3px 0; }
.bars ol .value b { font-weight: 600; } .bars ol small { color: var(--soft); font-size: 12.5px; }
.bars ol .reason { grid-column: 2 / 4; font-size: 13px; line-height: 1.35; padding: 4px 0; overflow-wrap: anywhere; }
.bars ol .reason.alone { grid-column: 1 / 4; } .bars ol .reason b { font-weight: 600; }
.bars ol .below { grid-column: 2 / 4; margin-top: -3px; padding-bottom: 6px; }
.bars ol svg { height: 0; min-height: 100%; overflow: hidden; }
.bars rect { fill: var(--series); } .bars rect.rest { fill: var(--line); }
.bars path { fill: none; vector-effect: non-scaling-stroke; stroke: var(--ink); stroke-width: 1.5; }
.bars path.halo { stroke: var(--card); stroke-width: 4; }
.bars path.line { stroke: var(--ink); stroke-width: 1.5; stroke-dasharray: 5 3; }
.bars path.limit { stroke: var(--bad); stroke-width: 2; stroke-dasharray: none; }
.legend { display: flex; flex-wrap: wrap; gap: 3px 18px; list-style: none; margin: 4px 0 12px; padding: 0;
  font-size: 13.5px; color: var(--soft); }
.legend li::before { content: ""; display: inline-block; width: 14px; height: 11px; margin-right: 7px;
  vertical-align: -1px; border-radius: 2px; background: var(--series); print-color-adjust: exact; }
.legend li.line::before, .legend li.limit::before { width: 0; height: 13px; border-radius: 0; background: none;
  border-left: 1.5px dashed var(--ink); }
.legend li.limit::before { border-left: 2px solid var(--bad); }
.legend li.span::before { height: 9px; border-radius: 0; border: solid var(--ink); border-width: 0 1.5px;
  background: linear-gradient(var(--ink), var(--ink)) center / 100% 1.5px no-repeat; }
@media (max-width: 600px) { .bars ol li { grid-template: auto / 1fr auto; gap: 0 10px; padding-top: 5px; }
  .bars ol .value { text-align: right; padding: 0; } .bars ol svg { grid-column: 1 / 3; grid-row: 2;
  height: 21px; min-height: 0; }
  .bars ol .reason, .bars ol .reason.alone, .bars ol .below { grid-column: 1 / 3; } .bars ol .below { margin: 0; } }
"""


@dataclass(frozen=True)
class BarPart:
    """A stretch of a bar: its amount and the number of its colour."""

    amount: float
    colour: int


@dataclass(frozen=True)
class Bar:
    """One line.

    Args:
        name: what it is of; empty where ``reason`` says it.
        value: its amount, as text with its unit.
        parts: of each bar of the line, from left to right; more bars than one lie above each other.
        note: small, behind the value.
        range: lowest and highest amount, drawn over the first bar.
        below: more text, under the bar.
        reason: why there is no amount: a word and an explanation; stands in place of the bar.
    """

    name: str
    value: str = ""
    parts: tuple[tuple[BarPart, ...], ...] = ()
    note: str = ""
    range: tuple[float, ...] = ()
    below: str = ""
    reason: tuple[str, str] | None = None

    @property
    def most(self) -> float:
        amounts = [sum(part.amount for part in bar) for bar in self.parts]
        return max([*amounts, *self.range], default=0.0)


@dataclass(frozen=True)
class BarBlock:
    """Lines under a heading, with a line drawn through all of them at ``line``: a baseline or a limit."""

    title: str
    note: str
    bars: tuple[Bar, ...]
    line: float | None = None


@dataclass(frozen=True)
class Key:
    """An entry of the legend: ``look`` is ``area``, ``span``, ``line`` or ``limit``."""

    text: str
    look: str
    colour: int = 0


def legend(keys: Sequence[Key]) -> str:
    """What colours and lines mean, for all figures below it; empty without keys."""
    entries = "".join(f'<li class="{key.look} c{key.colour}">{escape(key.text)}</li>' for key in keys)
    return f'<ul class="legend">{entries}</ul>' if keys else ""


def bar_figure(title: str, unit: str, blocks: Sequence[BarBlock], *, line_look: str = "line") -> str:
    """Blocks of bars on one scale; empty without blocks.

    Args:
        title: of the figure.
        unit: what the bars measure.
        blocks: drawn below each other.
        line_look: how the lines of the blocks look: ``line`` or ``limit``.
    """
    if not blocks:
        return ""
    most = max([bar.most for block in blocks for bar in block.bars] + [block.line or 0.0 for block in blocks])
    whole = (most or 1.0) * AIR
    head = f"<figcaption><h3>{escape(title)}</h3><span>{escape(unit)}</span></figcaption>"
    body = "".join(_block(block, whole, line_look) for block in blocks)
    return f'<figure class="bars">{head}{body}</figure>'


def _block(block: BarBlock, whole: float, line_look: str) -> str:
    note = f"<span>{escape(block.note)}</span>" if block.note else ""
    title = f"<h4>{escape(block.title)} {note}</h4>" if block.title or note else ""
    lines = "".join(f"<li>{''.join(_line(bar, block.line, whole, line_look))}</li>" for bar in block.bars)
    return f"{title}<ol>{lines}</ol>"


def _line(bar: Bar, line: float | None, whole: float, line_look: str) -> Iterator[str]:
    if bar.name:
        yield f'<span class="name">{escape(bar.name)}</span>'
    if bar.reason is not None:
        word, why = bar.reason
        alone = "" if bar.name else " alone"
        yield f'<span class="reason{alone}"><b class="bad">{escape(word)}</b>{escape(": " + why if why else "")}</span>'
        return
    yield _drawing(bar, line, whole, line_look)
    note = f" <small>{escape(bar.note)}</small>" if bar.note else ""
    yield f'<span class="value"><b>{escape(bar.value)}</b>{note}</span>'
    if bar.below:
        yield f'<small class="below">{escape(bar.below)}</small>'


def _drawing(bar: Bar, line: float | None, whole: float, line_look: str) -> str:
    """The bars of a line in a box of 100 x 27, stretched; what it says stands beside it as text."""
    high = 27.0
    each = min(THICK, (high - 5) / max(1, len(bar.parts)))
    top = (high - each * len(bar.parts)) / 2
    drawn = []
    for row, parts in enumerate(bar.parts):
        x = 0.0
        for part in parts:
            wide = 100 * part.amount / whole
            y = top + row * each
            drawn.append(
                f'<rect class="c{part.colour}" x="{x:.2f}" y="{y:.2f}" width="{wide:.2f}" height="{each * 0.86:.2f}"/>'
            )
            x += wide
    if line is not None:
        drawn.append(f'<path class="{line_look}" d="M{100 * line / whole:.2f} 0V{high:g}"/>')
    if len(bar.range) == 2:
        low, high_end = (100 * end / whole for end in bar.range)
        middle = top + each * 0.43
        ends = "".join(f"M{x:.2f} {middle - 4:.2f}v8" for x in (low, high_end))
        path = f"M{low:.2f} {middle:.2f}H{high_end:.2f}{ends}"
        drawn.append(f'<path class="halo" d="{path}"/><path d="{path}"/>')
    return f'<svg viewBox="0 0 100 {high:g}" preserveAspectRatio="none" aria-hidden="true">{"".join(drawn)}</svg>'
