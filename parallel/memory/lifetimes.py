"""From a stage and a rule to spans: how long each piece of memory is on the device while a microbatch goes through.

Takes the pieces of memory of a graph (``liveness``), the passes of a stage and an ``ActivationPolicy``; gives spans of
moments. What a layer makes that is computed again is another piece of memory than what it made at first. No torch here.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from parallel.memory.liveness import LiveRange, Piece
from parallel.memory.offload_window import Journey, on_device
from parallel.memory.passes import Passes
from parallel.memory.policy import ActivationPolicy, buffer_bytes


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
    """When each piece of memory of one stage and microbatch is there.

    Args:
        touched: pieces of memory; such that the stage's layers neither make nor keep nor use change nothing.

    Attributes:
        passes: as given.
        spans: of moments, on the device.
        unkept: of positions, in a forward pass that keeps nothing, as before a recomputation of the whole stage.
        held: bytes on the device between the two passes.
        held_inputs: of those, what entered the stage.
        host: bytes on the host between the two passes.
        host_inputs: there, when the whole stage is to be computed again.
        host_again: there besides, at most: what a segment keeps that is computed again.
    """

    def __init__(self, touched: Iterable[Piece], passes: Passes, policy: ActivationPolicy) -> None:
        self.spans: list[LiveRange] = []
        self.unkept: list[LiveRange] = []
        self.held = self.held_inputs = self.host = self.host_inputs = 0
        self.passes = passes
        self._starts = [segment.start for segment in passes.segments]
        self._moves = policy.offload != "none"
        self._smallest = policy.smallest
        self._journeys: list[Journey] = []
        self._host_again: Counter[int] = Counter()
        for piece in touched:
            self._take(piece)
        self.spans += on_device(self._journeys, policy.ahead, passes.turn)
        self.host_again = max(self._host_again.values(), default=0)

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
            self.host_inputs += buffer_bytes(size)
        if entered and not self._moves:  # the stage holds what it is given
            self._hold(size, begin, passes.end - 1, entered)
        elif moves and (kept or entering):
            self._move(size, begin, last, kept, entering)
        elif kept or entering:
            needs = [passes.back[place] for place in kept]
            needs += [passes.back[use.saved[0]] if use.saved else passes.again[use.last] for use in entering]
            self._hold(size, begin, max(needs), entered)
        else:
            self.spans.append(LiveRange(passes.forth(begin), passes.forth(last), size))
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
        self.spans.append(LiveRange(self.passes.forth(begin), last, size))
        self.held += size
        self.held_inputs += size if entered else 0

    def _move(self, size: int, begin: int, last: int, kept: Sequence[int], entering: Sequence[_Use]) -> None:
        """To the host in the forward pass; a segment that it enters asks for it when it begins again."""
        passes = self.passes
        latest = max([passes.back[place] for place in kept] + [passes.again[use.begin] for use in entering])
        asked = [(passes.back[place],) * 2 for place in kept]
        for use in entering:
            begin_again = passes.again[use.begin]
            if begin_again == latest:  # nobody else holds it by then: the segment keeps it anew
                asked.append((begin_again, begin_again))
                self._make_again(size, use, True)
            else:
                asked.append((begin_again, passes.again[use.last]))
                asked += [(passes.back[place],) * 2 for place in use.saved]
        packed = min([*kept, *(use.begin for use in entering)])
        self.host += self._leave(size, passes.forth(begin), passes.forth(last), passes.forth(packed), asked)

    def _make_again(self, size: int, use: _Use, moves: bool) -> None:
        """Hold what a segment that is computed again makes."""
        again, back = self.passes.again, self.passes.back
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
        self._journeys.append(Journey(size, begin, free, packed, tuple(sorted({*asked}))))
        return buffer_bytes(size)
