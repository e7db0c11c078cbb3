"""Bars with their names and values as text: one line per strategy, read by eye, by screen reader and without colour.

Plain values for the template ``bars.html.j2``. Only the bar itself is a drawing, stretched to the room there is: names,
values and reasons are text of the page, which breaks and grows as the reader's screen asks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

AIR = 1.06
"""The scale ends this much beyond the largest amount: a range or a line at the very end is seen whole."""


class BarPart(NamedTuple):
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


class Key(NamedTuple):
    """An entry of the legend: ``look`` is ``area``, ``span``, ``line`` or ``limit``."""

    text: str
    look: str
    colour: int = 0


@dataclass(frozen=True)
class BarFigure:
    """Blocks of bars on one scale.

    Args:
        title: of the figure.
        unit: what the bars measure.
        blocks: drawn below each other.
        line_look: how the lines of the blocks look: ``line`` or ``limit``.
    """

    title: str
    unit: str
    blocks: Sequence[BarBlock]
    line_look: str = "line"

    @property
    def whole(self) -> float:
        """The amount that is as long as there is room."""
        amounts = [bar.most for block in self.blocks for bar in block.bars]
        return AIR * (max([*amounts, *(block.line or 0.0 for block in self.blocks)]) or 1.0)
