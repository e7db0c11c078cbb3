"""Seconds that recomputation and offload add to the stages.

Takes a partition, what its stages cost without either, the rule for what is kept, and the speed of copies; gives
``StageCost`` anew. On a GPU copies overlap the computation, so that only longer copies count; on a CPU copies
are computed by the same cores and hide behind nothing. What goes out and what comes back at the same time shares the
link. No torch here.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Iterable, Sequence

from parallel.cost.stage_cost import Costs
from parallel.graph.partition import Partition
from parallel.memory.liveness import Piece
from parallel.memory.policy import ActivationPolicy, Segment, segments_of
from parallel.memory.stage_memory import StageMemory
from parallel.schedule.timeline import StageCost


def policy_costs(
    partition: Partition,
    stages: Sequence[StageCost],
    costs: Costs,
    policy: ActivationPolicy,
    *,
    copy_bandwidth: float,
    beside: bool,
    memory: StageMemory | None = None,
) -> list[StageCost]:
    """Return ``stages`` with what ``policy`` adds. A stage that is recomputed as a whole has an action for that, as
    long as its forward pass.

    Args:
        costs: of the layers.
        copy_bandwidth: bytes per second, each way.
        beside: copies overlap the computation.
        memory: of the partition's graph, where it is known.
    """
    if not policy.moves and not policy.segmented:
        return list(stages)
    memory = StageMemory(partition.graph) if memory is None else memory
    result = []
    for number, stage in enumerate(stages):
        segments = segments_of(partition, number, policy)
        again_s = sum(
            costs.layers[position].forward_s
            for segment in segments
            if segment.recompute
            for position in range(segment.start, segment.stop)
        )
        forward_s, backward_s = stage.forward_s, stage.backward_s + again_s
        if policy.moves:
            kept, again = moved_bytes(memory.touched((segments[0].start, segments[-1].stop)), segments, policy)
            # The action that recomputes a whole stage counts as a forward pass, copies and all: instead of those
            # out it makes those back.
            back = 0 if policy.stagewise else kept
            out_s, back_s = kept / copy_bandwidth, (back + 2 * again) / copy_bandwidth
            forward_s = max(forward_s, out_s) if beside else forward_s + out_s
            backward_s = max(backward_s, back_s) if beside else backward_s + back_s
        more = backward_s - stage.backward_s
        result.append(
            dataclasses.replace(
                stage, forward_s=forward_s, backward_s=backward_s, backward_input_s=stage.backward_input_s + more
            )
        )
    return result


def moved_bytes(pieces: Iterable[Piece], segments: Sequence[Segment], policy: ActivationPolicy) -> tuple[int, int]:
    """Return what offloading moves of a stage, whose layers ``segments`` cover: bytes that go out in a forward pass and
    come back before its backward pass, and bytes that do so within the backward pass, of layers that are recomputed.

    Args:
        pieces: of memory of the model's graph; those that the stage does not touch change nothing.
    """
    start, stop = segments[0].start, segments[-1].stop
    if policy.stagewise:
        segments = (Segment(start, stop, True),)
    begins = [segment.start for segment in segments]
    kept = again = 0
    for piece in pieces:
        if piece.bytes < policy.smallest:
            continue
        saved = {bisect.bisect(begins, layer) - 1 for layer in piece.saved if start <= layer < stop}
        entered = {
            number
            for made, use in piece.used
            if start <= use < stop and made < segments[number := bisect.bisect(begins, use) - 1].start
        }
        if any(not segments[number].recompute for number in saved) or any(segments[n].recompute for n in entered):
            kept += piece.bytes
        elif saved:
            again += piece.bytes
    return kept, again
