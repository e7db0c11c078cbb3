"""Bytes that a stage takes for one microbatch: held between its passes, and live at most while one runs.

Takes a graph that was traced with its loss, the bounds of a stage and the pieces of memory that it touches
(``liveness``); gives ``StageBytes`` for any segments that are recomputed, by arithmetic over all pieces at once. What
moves to the host is counted piece by piece (``lifetimes``); tests hold both against each other. Buffers of modules, a
few numbers per channel, are not counted. No torch here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from parallel.graph.layers import LayerGraph
from parallel.memory.liveness import Piece, gradient_spans
from parallel.memory.policy import Segment


@dataclass(frozen=True)
class StageBytes:
    """Bytes of a stage for one microbatch of the traced size.

    Attributes:
        parameters: of its layers; ``largest_parameter``: of the largest of them.
        inputs: what enters it and is held until its backward pass: values received, or the model's input.
        activations: all that is held between its forward and backward pass, ``inputs`` among it.
        forward: live at most in a forward pass.
        forward_only: live at most in one that keeps nothing, as before recomputation.
        backward: live at most in a backward pass that adds to gradients of parameters.
        first_backward: in one that makes them; they count.
        received, sent: of values from and to other stages; their gradients are ``returned`` and ``awaited``.
    """

    parameters: int
    inputs: int
    activations: int
    forward: int
    forward_only: int
    backward: int
    first_backward: int
    received: int
    returned: int
    sent: int
    awaited: int
    largest_parameter: int


Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
NEVER = 1 << 40
"""Behind every position."""


@dataclass(frozen=True)
class _Moments:
    """Moments of ``lifetimes.Passes``, by position behind the stage's first; ``again`` is unused where nothing runs
    again."""

    turn: int
    end: int
    again: Ints
    back: Ints


class StageArrays:
    """Bytes of the layers from position ``start`` to ``stop``, not included, for any choice of segments.

    Args:
        touched: pieces of memory that they make, keep or use.
    """

    def __init__(self, graph: LayerGraph, start: int, stop: int, touched: Sequence[Piece]) -> None:
        self._start, self._stop = start, stop
        touched = touched or [Piece(0, made=[start])]
        self._last_layer = len(graph.layers) - 1
        # An entry for each piece and each position of the stage at which it is made, kept or used, in this order.
        entries: list[tuple[int, int, bool, bool, int, int]] = []
        for number, piece in enumerate(touched):
            makers: dict[int, int] = {}
            users: dict[int, int] = {}
            for made, use in piece.used:
                makers[use] = min(made, makers.get(use, NEVER))
                users[made] = max(use, users.get(made, -1))
            made_at, saved_at = set(piece.made), set(piece.saved)
            entries += [
                (number, at, at in made_at or at in saved_at, at in saved_at, makers.get(at, NEVER), users.get(at, -1))
                for at in sorted(made_at | saved_at | makers.keys())
                if start <= at < stop
            ]
        columns = np.array(entries, dtype=np.int64).reshape(-1, 6).T
        self._piece, self._at = columns[0], columns[1]
        self._here = np.where(columns[2] > 0, self._at, NEVER)
        self._saved = np.where(columns[3] > 0, self._at, NEVER)
        self._first_maker, self._last_user = columns[4], columns[5]
        self._bytes = np.array([piece.bytes for piece in touched], dtype=np.int64)
        self._entered = np.array(
            [any(start <= use < stop and made < start for made, use in piece.used) for piece in touched], dtype=bool
        )
        self._sent = np.array([any(use >= stop for _, use in piece.used) for piece in touched], dtype=bool)
        self._counted = self._entered | np.array([any(p < stop for p in piece.made) for piece in touched], dtype=bool)
        self._gradients = np.array(gradient_spans(graph, start, stop), dtype=np.int64).reshape(-1, 3).T
        self._params = np.array(graph.owned_bytes[start:stop], dtype=np.int64)
        keeping = np.zeros(stop - start + 1, dtype=np.int64)
        keeping[1:][sorted({at - start for piece in touched for at in piece.saved if start <= at < stop})] = 1
        self._keeping = keeping.cumsum()  # layers before a position that keep anything
        sent = [graph.layers[k] for k in range(start, stop) if graph.last_uses[k] >= stop]
        names = {name for layer in graph.layers[start:stop] for name in layer.inputs if graph.position[name] < start}
        received = [graph.by_name[name] for name in names]
        self._messages = {
            "received": sum(layer.output_bytes for layer in received),
            "returned": sum(layer.output_bytes for layer in received if layer.differentiable),
            "sent": sum(layer.output_bytes for layer in sent),
            "awaited": sum(layer.output_bytes for layer in sent if layer.differentiable),
            "largest_parameter": max(layer.largest_param_bytes for layer in graph.layers[start:stop]),
        }

    @property
    def plain(self) -> StageBytes:
        """Bytes of the stage when all is kept."""
        return self.stage_bytes((Segment(self._start, self._stop, False),))

    def stage_bytes(self, segments: Sequence[Segment]) -> StageBytes:
        """Return the bytes of the stage, whose layers ``segments`` cover."""
        starts, stops, again = self._parts(segments)
        moments = _moments(starts, stops, again)
        # Runs of entries of one piece in one segment: a use.
        number = np.searchsorted(starts, self._at, side="right") - 1
        new = np.ones(len(self._at), dtype=bool)
        new[1:] = (self._piece[1:] != self._piece[:-1]) | (number[1:] != number[:-1])
        heads = np.flatnonzero(new)
        piece, segment = self._piece[heads], number[heads]
        first, stop, runs_again = starts[segment], stops[segment], again[segment]
        enters = np.logical_or.reduceat(self._first_maker < starts[number], heads)
        begin = np.where(enters, first, np.minimum.reduceat(self._here, heads))
        handed = enters & (runs_again | (len(starts) > 1))
        used = np.maximum(self._at, np.minimum(self._last_user, stops[number] - 1))
        last = np.where(handed, stop - 1, np.maximum.reduceat(used, heads))
        saved = np.minimum.reduceat(self._saved, heads)
        keeps = saved < NEVER
        zero = self._start
        done = np.where(keeps, moments.back[np.where(keeps, saved, zero) - zero], moments.again[last - zero])
        needed = np.where(np.where(runs_again, enters, keeps), done, -1)
        # Pieces, of one use or more.
        heads = np.flatnonzero(np.concatenate([[True], piece[1:] != piece[:-1]]))
        begins = np.where(self._entered, zero, begin[heads])
        lasts = np.where(self._entered | self._sent, self._stop - 1, np.maximum.reduceat(last, heads))
        held = np.maximum.reduceat(needed, heads)
        ends = np.where(self._entered, moments.end - 1, np.where(held >= 0, held, lasts - zero))
        kept = self._entered | (held >= 0)
        anew = runs_again & ~enters
        messages = (self._gradients[0] == zero) & (self._gradients[1] == self._stop - 1)
        live = _running(
            moments.end,
            (begins - zero, ends, self._bytes),
            (moments.again[begin[anew] - zero], done[anew], self._bytes[piece[anew]]),
            (
                np.where(messages, moments.turn, moments.back[self._gradients[1] - zero]),
                moments.back[self._gradients[0] - zero],
                self._gradients[2],
            ),
        )
        counted = self._counted
        alone = _running(moments.turn, (begins[counted] - zero, lasts[counted] - zero, self._bytes[counted]))
        own, made = np.zeros((2, moments.end - moments.turn), dtype=np.int64)
        own[moments.back - moments.turn] = self._params
        made[moments.back - moments.turn] = self._params[::-1].cumsum()[::-1]
        return StageBytes(
            parameters=int(self._params.sum()),
            inputs=int(self._bytes[self._entered].sum()),
            activations=int(self._bytes[kept].sum()),
            forward=int(live[: moments.turn].max()),
            forward_only=int(alone.max()),
            backward=int((live[moments.turn :] + own).max()),
            first_backward=int((live[moments.turn :] + np.maximum.accumulate(made)).max()),
            **self._messages,
        )

    def _parts(self, segments: Sequence[Segment]) -> tuple[Ints, Ints, Flags]:
        """Return first position, position after the last, and whether it runs again, as ``lifetimes.passes_of``."""
        parts: list[tuple[int, int, bool]] = []
        for each in segments:
            if each.recompute and each.start < self._last_layer < each.stop:
                parts += [(each.start, self._last_layer, True), (self._last_layer, each.stop, False)]
            else:
                parts.append((each.start, each.stop, each.recompute))
        starts, stops = (np.array([part[k] for part in parts], dtype=np.int64) for k in (0, 1))
        keeps = self._keeping[stops - self._start] > self._keeping[starts - self._start]
        return starts, stops, np.array([part[2] for part in parts], dtype=bool) & keeps


def _moments(starts: Ints, stops: Ints, again: Flags) -> _Moments:
    lengths = stops - starts
    turn = int(lengths.sum())
    takes = lengths * (1 + again)
    begins = turn + takes[::-1].cumsum()[::-1] - takes  # the last segment comes first
    at = np.arange(starts[0], stops[-1])
    back = np.repeat(begins + lengths * again + stops - 1, lengths) - at
    return _Moments(turn, turn + int(takes.sum()), np.repeat(begins - starts, lengths) + at, back)


def _running(count: int, *spans: tuple[Any, Any, Any]) -> Ints:
    """Bytes that live at each of ``count`` moments; of spans: first, last, bytes."""
    change = np.zeros(count + 1, dtype=np.int64)
    for first, last, size in spans:
        np.add.at(change, first, size)
        np.subtract.at(change, last + 1, size)
    return change[:-1].cumsum()
