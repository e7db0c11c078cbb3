"""What a picture of a graph consists of, in px: boxes, wires, bands of stages, and the sizes they are drawn in."""

from __future__ import annotations

from dataclasses import dataclass, field

UNIT = 16.0
"""Width of a lane."""
BOX_HEIGHT, GAP, TRACK, CUT = 42.0, 25.0, 7.0, 26.0
"""Heights: of a box, of the least gap between rows, of one more wire across in it, of the room for a cut in it."""
INTO, OUT_OF = 0.3, 0.7
"""Where on the right side of a box wires come in and go out, as parts of its height."""
PORT = 11.0
"""From the middle of a box to where wires from the side come in from above."""

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Box:
    """Part ``number`` in ``column``; x and y of the top left corner."""

    number: int
    column: int
    x: float
    y: float
    width: float
    height: float = BOX_HEIGHT


@dataclass(frozen=True, slots=True)
class Wire:
    """What part ``source`` gives, along ``points``.

    Attributes:
        arrow: it ends at a part.
        dot: it begins on another wire of the same source.
        kind: "trunk" straight from box to box, "lane" down beside the boxes, "stub" elsewhere.
    """

    source: int
    points: tuple[Point, ...]
    arrow: bool
    dot: bool = False
    kind: str = "stub"


@dataclass(frozen=True, slots=True)
class Band:
    """Rows of one stage in one column: ``top`` to ``bottom``; the stage begins here or goes on."""

    stage: int
    column: int
    left: float
    right: float
    top: float
    bottom: float
    begins: bool


@dataclass
class Layout:
    """All that is drawn, in px."""

    boxes: list[Box] = field(default_factory=list)
    wires: list[Wire] = field(default_factory=list)
    bands: list[Band] = field(default_factory=list)
    width: float = 0.0
    height: float = 0.0
