"""Bytes of a stage whose activations are computed again or moved to the host, under an ``ActivationPolicy``.

Takes a partition of a graph that was traced with its loss, and the rule; gives ``StageBytes``, so that the bytes of
ranks follow for any schedule. Copies between device and host are taken to be done at once; on a GPU what has begun to
leave is counted by the window (``ahead``). No torch here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import accumulate

from parallel.graph.layers import LayerGraph
from parallel.graph.partition import Partition
from parallel.memory.lifetimes import Lifetimes
from parallel.memory.liveness import LiveRange, Piece, gradient_spans, pieces, running_bytes
from parallel.memory.passes import Passes
from parallel.memory.policy import ActivationPolicy, Segment
from parallel.memory.segments import segments_of
from parallel.memory.stage_bytes import StageBytes, stage_bytes, touched_by


def kept_bytes(
    partition: Partition, policy: ActivationPolicy, known: Iterable[Piece] | None = None
) -> list[StageBytes]:
    """Return the bytes of every stage.

    Args:
        known: what ``pieces`` gives for the graph, where it is known.

    Raises:
        ValueError: a chosen run of layers does not fit the model.
    """
    known = pieces(partition.graph) if known is None else list(known)
    plain = stage_bytes(partition, known)
    if policy.offload == "none" and not policy.segmented:
        return plain
    stages = zip(plain, lifetimes_of(partition, policy, known), strict=True)
    return [with_lifetimes(partition.graph, lives, stage) for stage, lives in stages]


def lifetimes_of(
    partition: Partition, policy: ActivationPolicy, known: Iterable[Piece] | None = None
) -> list[Lifetimes]:
    """Return the lifetimes of every stage; arguments as ``kept_bytes``."""
    touched = touched_by(partition, pieces(partition.graph) if known is None else known)
    return [
        Lifetimes(own, passes_of(partition.graph, segments_of(partition, k, policy), own), policy)
        for k, own in enumerate(touched)
    ]


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


def with_lifetimes(graph: LayerGraph, lives: Lifetimes, plain: StageBytes) -> StageBytes:
    """Return the bytes of a stage whose pieces of memory live so.

    Args:
        plain: of the stage, when all is kept on the device.
    """
    passes = lives.passes
    live = running_bytes([*lives.spans, *_gradients(graph, passes)], 0, passes.end)
    params = graph.owned_bytes[passes.start : passes.stop]
    made = list(accumulate(reversed(params)))[::-1]
    own, before = [0] * passes.end, [0] * passes.end
    for position, moment in passes.back.items():
        own[moment], before[moment] = params[position - passes.start], made[position - passes.start]
    before[passes.turn :] = accumulate(before[passes.turn :], max)  # gradients are there while a segment runs again
    backward = range(passes.turn, passes.end)
    return replace(
        plain,
        inputs=lives.held_inputs,
        activations=lives.held,
        forward=max(live[: passes.turn]),
        forward_only=max(running_bytes(lives.unkept, passes.start, passes.stop)),
        backward=max(live[now] + own[now] for now in backward),
        first_backward=max(live[now] + before[now] for now in backward),
    )


def _gradients(graph: LayerGraph, passes: Passes) -> Iterable[LiveRange]:
    """Memory of gradients of values, by moments; that of messages is there from the beginning."""
    for span in gradient_spans(graph, passes.start, passes.stop):
        message = (span.first, span.last) == (passes.start, passes.stop - 1)
        begin = passes.turn if message else passes.back[span.last]
        yield LiveRange(begin, passes.back[span.first], span.bytes)
