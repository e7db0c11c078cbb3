"""Spans over which each piece of memory of a stage is on the device, and its bytes on the host, for one microbatch.

Takes the pieces of memory that a stage touches (``liveness``), its passes and an ``ActivationPolicy``; gives spans of
moments, and bytes. What is recomputed is another piece of memory than what was made at first. Copies between device and
host are taken to be done at once; on a GPU what has begun to leave is counted by the window (``ahead``). No torch here.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from parallel.graph.layers import LayerGraph
from parallel.memory.liveness import LiveRange, Piece, gradient_spans, running_bytes
from parallel.memory.offload_window import OffloadInterval, on_device
from parallel.memory.policy import ActivationPolicy, Segment, buffer_bytes
from parallel.memory.stage_bytes import StageBytes


@dataclass(frozen=True)
class HostBytes:
    """Bytes of a stage on the host for one microbatch of the traced size.

    Attributes:
        kept: between its forward and its backward pass.
        inputs: when the whole stage is to be computed again.
        again: besides, at most, in a backward pass in which segments are computed again.
    """

    kept: int
    inputs: int
    again: int


class Passes:
    """Moments of a stage's layers in the two passes of a microbatch, by position in the graph.

    First every layer runs forward; then segment by segment, the last first, forward again where it is recomputed, and
    backward.

    Args:
        segments: of the stage, in order, without gaps.

    Attributes:
        start, stop: positions of the stage's first layer, and after its last.
        recompute_at: position -> moment at which the layer is recomputed, where it is.
        backward_at: position -> moment of its backward pass.
        backward_start: the first moment of the backward pass.
        end: after the last moment.
    """

    def __init__(self, segments: Sequence[Segment]) -> None:
        self.segments = tuple(segments)
        self.start, self.stop = segments[0].start, segments[-1].stop
        self.backward_start = now = self.stop - self.start
        self.recompute_at: dict[int, int] = {}
        self.backward_at: dict[int, int] = {}
        for segment in reversed(segments):
            places = range(segment.start, segment.stop)
            if segment.recompute:
                self.recompute_at |= {place: now + k for k, place in enumerate(places)}
                now += len(places)
            self.backward_at |= {place: now + k for k, place in enumerate(reversed(places))}
            now += len(places)
        self.end = now

    def forward_at(self, position: int) -> int:
        """Moment at which the layer first runs forward."""
        return position - self.start


def passes_of(graph: LayerGraph, segments: Sequence[Segment], touched: Iterable[Piece]) -> Passes:
    """Return the passes of a stage. Nobody asks for a segment that keeps nothing: what enters it is not held, and it is
    not computed again. Nor is the loss, which is computed with the model's output, but in no segment."""
    saved = {position for piece in touched for position in piece.saved}
    last = len(graph.layers) - 1
    run: list[Segment] = []
    for segment in segments:
        if segment.recompute and segment.start < last < segment.stop:
            run += [Segment(segment.start, last, True), Segment(last, segment.stop, False)]
        else:
            run.append(segment)
    return Passes([replace(s, recompute=s.recompute and not saved.isdisjoint(range(s.start, s.stop))) for s in run])


@dataclass(frozen=True, slots=True)
class _Use:
    """A piece in one segment.

    Attributes:
        begin, last: positions at which it is first and last needed while the segment runs forward.
        saved: positions in the segment that keep it, in ascending order.
        enters: it is there before the segment.
        again: the segment is computed again.
    """

    begin: int
    last: int
    saved: tuple[int, ...]
    enters: bool
    again: bool


class Lifetimes:
    """Spans over which each piece of memory of one stage and microbatch is live.

    Args:
        touched: pieces of memory; such that the stage's layers neither make nor keep nor use change nothing.

    Attributes:
        passes: as given.
        spans: of moments, on the device.
        unkept: of positions, in a forward pass that keeps nothing, as before a recomputation of the whole stage.
        held: bytes on the device between the two passes.
        held_inputs: of those, what entered the stage.
    """

    def __init__(self, touched: Iterable[Piece], passes: Passes, policy: ActivationPolicy) -> None:
        self.spans: list[LiveRange] = []
        self.unkept: list[LiveRange] = []
        self.held = self.held_inputs = self._host = self._host_inputs = 0
        self.passes = passes
        self._starts = [segment.start for segment in passes.segments]
        self._moves = policy.offload != "none"
        self._smallest = policy.smallest
        self._intervals: list[OffloadInterval] = []
        self._host_again: Counter[int] = Counter()
        for piece in touched:
            self._take(piece)
        self.spans += on_device(self._intervals, policy.ahead, passes.backward_start)

    @property
    def on_host(self) -> HostBytes:
        """Bytes on the host."""
        return HostBytes(self._host, self._host_inputs, max(self._host_again.values(), default=0))

    def stage_bytes(self, graph: LayerGraph, plain: StageBytes) -> StageBytes:
        """Return the bytes of the stage on the device.

        Args:
            plain: of the stage, when all is kept there.
        """
        passes = self.passes
        live = running_bytes([*self.spans, *_gradients(graph, passes)], 0, passes.end)
        params = graph.owned_bytes[passes.start : passes.stop]
        made = list(accumulate(reversed(params)))[::-1]
        own, before = [0] * passes.end, [0] * passes.end
        for position, moment in passes.backward_at.items():
            own[moment], before[moment] = params[position - passes.start], made[position - passes.start]
        before[passes.backward_start :] = accumulate(before[passes.backward_start :], max)
        backward = range(passes.backward_start, passes.end)
        return replace(
            plain,
            inputs=self.held_inputs,
            activations=self.held,
            forward=max(live[: passes.backward_start]),
            forward_only=max(running_bytes(self.unkept, passes.start, passes.stop)),
            backward=max(live[now] + own[now] for now in backward),
            first_backward=max(live[now] + before[now] for now in backward),
        )

    def _take(self, piece: Piece) -> None:
        uses = self._uses(piece)
        if not uses:
            return
        passes, size = self.passes, piece.bytes
        entered = any(passes.start <= use < passes.stop and made < passes.start for made, use in piece.used)
        begin = passes.start if entered else uses[0].begin
        sent = any(use >= passes.stop for _, use in piece.used)
        # Who runs a stage holds what it is handed, and what it gives, until it is through.
        last = passes.stop - 1 if entered or sent else max(use.last for use in uses)
        moves = self._moves and size >= self._smallest
        kept = [place for use in uses if not use.again for place in use.saved]
        entering = [use for use in uses if use.again and use.enters]
        if entered or any(place < passes.stop for place in piece.made):
            self.unkept.append(LiveRange(begin, last, size))
        if entered and moves:
            self._host_inputs += buffer_bytes(size)
        if entered and not self._moves:  # the stage holds what it is given
            self._hold(size, begin, passes.end - 1, entered)
        elif moves and (kept or entering):
            self._move(size, begin, last, kept, entering)
        elif kept or entering:
            needs = [passes.backward_at[place] for place in kept]
            for use in entering:
                needs.append(passes.backward_at[use.saved[0]] if use.saved else passes.recompute_at[use.last])
            self._hold(size, begin, max(needs), entered)
        else:
            self.spans.append(LiveRange(passes.forward_at(begin), passes.forward_at(last), size))
        for use in uses:
            if use.again and not use.enters:
                self._make_again(size, use, moves)

    def _uses(self, piece: Piece) -> list[_Use]:
        """Return the uses of a piece by segment, in order."""
        passes, uses = self.passes, []
        places = {*piece.made, *piece.saved, *(use for _, use in piece.used)}
        numbers = {bisect.bisect(self._starts, place) - 1 for place in places if passes.start <= place < passes.stop}
        for number in sorted(numbers):
            segment = passes.segments[number]
            start, stop = segment.start, segment.stop
            here = [place for place in (*piece.made, *piece.saved) if start <= place < stop]
            enters = any(start <= use < stop and made < start for made, use in piece.used)
            begin = start if enters else min(here)
            # What enters a segment is handed to it, and what it gives is handed on, as a whole.
            handed = enters and (segment.recompute or len(passes.segments) > 1)
            used = [min(use, stop - 1) for made, use in piece.used if start <= made < stop or start <= use < stop]
            last = stop - 1 if handed else max([begin, *here, *used])
            saved = sorted(place for place in piece.saved if start <= place < stop)
            uses.append(_Use(begin, last, tuple(saved), enters, segment.recompute))
        return uses

    def _hold(self, size: int, begin: int, last: int, entered: bool) -> None:
        """Hold on the device from position ``begin`` to moment ``last``."""
        self.spans.append(LiveRange(self.passes.forward_at(begin), last, size))
        self.held += size
        self.held_inputs += size if entered else 0

    def _move(self, size: int, begin: int, last: int, kept: Sequence[int], entering: Sequence[_Use]) -> None:
        """To the host in the forward pass; a segment that it enters asks for it when it begins again."""
        passes = self.passes
        latest = max(passes.backward_at[place] for place in kept) if kept else -1
        latest = max([latest, *(passes.recompute_at[use.begin] for use in entering)])
        asked = [(passes.backward_at[place],) * 2 for place in kept]
        for use in entering:
            begin_again = passes.recompute_at[use.begin]
            if begin_again == latest:  # nobody else holds it by then: the segment keeps it anew
                asked.append((begin_again, begin_again))
                self._make_again(size, use, True)
            else:
                asked.append((begin_again, passes.recompute_at[use.last]))
                asked += [(passes.backward_at[place],) * 2 for place in use.saved]
        packed = min([*kept, *(use.begin for use in entering)])
        begin, last, packed = (passes.forward_at(position) for position in (begin, last, packed))
        self._host += self._leave(size, begin, last, packed, asked)

    def _make_again(self, size: int, use: _Use, moves: bool) -> None:
        """Hold what a segment that is computed again makes."""
        again, back = self.passes.recompute_at, self.passes.backward_at
        begin, free = again[use.begin] + use.enters, again[use.last]  # at its first moment it has just been brought
        if not use.saved:
            self.spans.append(LiveRange(begin, free, size))
        elif moves:
            asked = [(back[place],) * 2 for place in use.saved]
            start = self._starts[bisect.bisect(self._starts, use.begin) - 1]
            self._host_again[start] += self._leave(size, begin, free, again[use.saved[0]], asked)
        else:
            self.spans.append(LiveRange(begin, back[use.saved[0]], size))

    def _leave(self, size: int, begin: int, free: int, packed: int, asked: Sequence[tuple[int, int]]) -> int:
        """To the host at moment ``packed``, and back. Gives its bytes there."""
        self._intervals.append(OffloadInterval(size, begin, free, packed, tuple(sorted({*asked}))))
        return buffer_bytes(size)


def _gradients(graph: LayerGraph, passes: Passes) -> Iterable[LiveRange]:
    """Memory of gradients of values, by moments; that of messages is there from the beginning."""
    for span in gradient_spans(graph, passes.start, passes.stop):
        message = (span.first, span.last) == (passes.start, passes.stop - 1)
        begin = passes.backward_start if message else passes.backward_at[span.last]
        yield LiveRange(begin, passes.backward_at[span.first], span.bytes)
