"""Bytes that a stage takes for one microbatch: held between its passes, and live at most while one runs.

Takes a partition of a graph that was traced with its loss; gives ``StageBytes``, from the spans over which pieces of
memory live (``liveness``). Buffers of modules, a few numbers per channel, are not counted. No torch here.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate, pairwise

from parallel.graph.layers import LayerGraph
from parallel.graph.partition import Partition
from parallel.memory.liveness import LiveRange, Piece, gradient_spans, pieces, running_bytes


@dataclass(frozen=True)
class StageBytes:
    """What a stage holds of one microbatch of the traced size.

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


def stage_bytes(partition: Partition, known: Iterable[Piece] | None = None) -> list[StageBytes]:
    """Return the bytes of every stage.

    Args:
        known: what ``pieces`` gives for the graph, where it is known.
    """
    bounds = pairwise([*partition.starts, len(partition.graph.layers)])
    touched = touched_by(partition, pieces(partition.graph) if known is None else known)
    return [bytes_of_window(partition.graph, *bound, own) for bound, own in zip(bounds, touched, strict=True)]


def touched_by(partition: Partition, all_pieces: Iterable[Piece]) -> list[list[Piece]]:
    """Return, by stage, the pieces of memory that its layers make, keep or use."""
    touched: list[list[Piece]] = [[] for _ in partition.starts]
    for piece in all_pieces:
        places = {*piece.made, *piece.saved, *(use for _, use in piece.used)} - {-1}
        for stage in {bisect.bisect(partition.starts, place) - 1 for place in places}:
            touched[stage].append(piece)
    return touched


def window_bytes(graph: LayerGraph, start: int, stop: int) -> StageBytes:
    """Return the bytes of the layers from position ``start`` to ``stop``, not included, as a stage."""
    return bytes_of_window(graph, start, stop, pieces(graph))


def bytes_of_window(graph: LayerGraph, start: int, stop: int, touched: Iterable[Piece]) -> StageBytes:
    """Return what ``window_bytes`` does, from the pieces of memory that its layers make, keep or use; others change
    nothing."""
    inputs, forth, back, alone = [], [], [], []
    for piece in touched:
        inside = [made for made in piece.made if start <= made < stop]
        saved = [position for position in piece.saved if start <= position < stop]
        if any(start <= use < stop and made < start for made, use in piece.used):
            inputs.append(LiveRange(start, stop - 1, piece.bytes))
            continue
        if inside:
            alone.append(LiveRange(min(inside), max([*inside, *(use for _, use in piece.used)]), piece.bytes))
        if saved:
            back.append(LiveRange(min(saved), stop - 1, piece.bytes))
            forth.append(LiveRange(min([*saved, *inside]), stop - 1, piece.bytes))
        else:
            forth += alone[-1:] if inside else []
    last = graph.last_uses
    sent = [graph.layers[k] for k in range(start, stop) if last[k] >= stop]
    received = {name for layer in graph.layers[start:stop] for name in layer.inputs if graph.position[name] < start}
    params = graph.owned_bytes[start:stop]
    backward = running_bytes([*inputs, *back, *gradient_spans(graph, start, stop)], start, stop)
    made = list(accumulate(reversed(params)))[::-1]
    return StageBytes(
        parameters=sum(params),
        inputs=_total(inputs),
        activations=_total(inputs) + _total(back),
        forward=max(running_bytes([*inputs, *forth], start, stop)),
        forward_only=max(running_bytes([*inputs, *alone], start, stop)),
        backward=max(map(sum, zip(backward, params, strict=True))),
        first_backward=max(map(sum, zip(backward, made, strict=True))),
        received=sum(graph.by_name[name].output_bytes for name in received),
        returned=sum(graph.by_name[name].output_bytes for name in received if graph.by_name[name].differentiable),
        sent=sum(layer.output_bytes for layer in sent),
        awaited=sum(layer.output_bytes for layer in sent if layer.differentiable),
        largest_parameter=max(layer.largest_param_bytes for layer in graph.layers[start:stop]),
    )


def _total(spans: Iterable[LiveRange]) -> int:
    return sum(span.bytes for span in spans)
