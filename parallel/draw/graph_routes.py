"""From a column in px to its boxes and wires: straight down, across in gaps, and in lanes beside the boxes.

No wire runs under a box, and wires of two sources lie on one line only where both lead to one part.
"""

from __future__ import annotations

from parallel.draw.graph_column import Lane
from parallel.draw.graph_frame import Frame
from parallel.draw.graph_places import BOX_HEIGHT, INTO, OUT_OF, Box, Layout, Point, Wire


def route(frame: Frame, number: int, layout: Layout) -> None:
    """Add boxes and wires of column ``number`` to ``layout``; notes in ``frame`` where nets enter and leave."""
    wires = layout.wires
    for part in frame.members:
        layout.boxes.append(Box(part, number, frame.x(part), frame.row_y[frame.rows[part]], frame.box_width))
    for source, target in sorted(frame.column.straight):
        x = frame.middle(source)
        wires.append(Wire(source, ((x, frame.below(source)), (x, frame.above(target))), True, kind="trunk"))
    for source, target in frame.gap_routed():
        _across(frame, layout, source, target)
    for source, target in sorted(frame.column.entering.items()):
        frame.enters[source] = frame.middle(target)
    for source in sorted(frame.column.leaving):
        frame.leaves[source] = frame.middle(source)
    for lane in frame.column.lanes:
        _lane(frame, layout, lane)


def _across(frame: Frame, layout: Layout, source: int, target: int) -> None:
    x, row = frame.middle(source), frame.rows[target] - 1
    start = (x, frame.below(source))
    if ("into", target) in frame.across.get(row, {}) and (frame.joins(target) or source in frame.column.dropped):
        y, end = frame.track_y[row, "into", target], frame.port(target, x)
    else:
        y, end = frame.track_y[row, "out of", source], frame.middle(target)
    points = (start, (x, y), (end, y), (end, frame.above(target)))
    layout.wires.append(Wire(source, points, True))


def _lane(frame: Frame, layout: Layout, lane: Lane) -> None:
    """From its source into the lane, down, and out at each target; the last one is where the lane ends."""
    source, x = lane.net.source, frame.lane_x(lane)
    if source in frame.column.x and frame.beside(source, lane):
        y = frame.above(source) + OUT_OF * BOX_HEIGHT
        points: list[Point] = [(frame.x(source) + frame.box_width, y), (x, y)]
    elif source in frame.column.x:
        y = frame.track_y[frame.rows[source], "out of", source]
        points = [(frame.middle(source), frame.below(source)), (frame.middle(source), y), (x, y)]
    else:
        (frame.aside if source in frame.enters else frame.enters)[source] = x
        points = [(x, frame.top)]
    targets = sorted(lane.targets, key=lambda target: (frame.rows[target], target))
    if lane.last > frame.column.last:
        frame.leaves[source] = x
        layout.wires.append(Wire(source, (*points, (x, frame.bottom)), False, kind="lane"))
    else:
        last = targets.pop()
        layout.wires.append(Wire(source, (*points, *_into(frame, last, lane)), True, kind="lane"))
    for target in targets:
        layout.wires.append(Wire(source, tuple(_into(frame, target, lane)), True, dot=True))


def _into(frame: Frame, target: int, lane: Lane) -> list[Point]:
    """From the lane to the part."""
    x = frame.lane_x(lane)
    if frame.beside(target, lane):
        y = frame.above(target) + INTO * BOX_HEIGHT
        return [(x, y), (frame.x(target) + frame.box_width, y)]
    y, port = frame.track_y[frame.rows[target] - 1, "into", target], frame.port(target, x)
    return [(x, y), (port, y), (port, frame.above(target))]
