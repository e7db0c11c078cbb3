"""The two passes of a microbatch through a stage, moment by moment.

First every layer forward; then segment by segment, the last first: forward again where the segment is computed again,
and backward. Takes the segments of a stage; gives the moments of its layers. No torch here.
"""

from __future__ import annotations

from collections.abc import Sequence

from parallel.memory.policy import Segment


class Passes:
    """Moments of a stage's layers, by position in the graph.

    Args:
        segments: of the stage, in order, without gaps.

    Attributes:
        start, stop: positions of the stage's first layer, and after its last.
        again: position -> moment at which the layer runs forward again, where it does.
        back: position -> moment of its backward pass.
        turn: the first moment of the backward pass.
        end: after the last moment.
    """

    def __init__(self, segments: Sequence[Segment]) -> None:
        self.segments = tuple(segments)
        self.start, self.stop = segments[0].start, segments[-1].stop
        self.turn = now = self.stop - self.start
        self.again: dict[int, int] = {}
        self.back: dict[int, int] = {}
        for segment in reversed(segments):
            places = range(segment.start, segment.stop)
            if segment.recompute:
                self.again |= {place: now + k for k, place in enumerate(places)}
                now += len(places)
            self.back |= {place: now + k for k, place in enumerate(reversed(places))}
            now += len(places)
        self.end = now

    def forth(self, position: int) -> int:
        """Moment at which the layer first runs forward."""
        return position - self.start
