"""Timeline of a step that ran, from the spans of all ranks, and the costs of its stages.

With these costs, ``simulate`` returns the best that the same schedule could do.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence

from parallel.comm.communicator import Communicator
from parallel.comm.objects import gather_objects
from parallel.schedule.action import Action, Kind
from parallel.schedule.timeline import Span, StageCost, Timeline


def gather_timeline(
    communicator: Communicator, spans: Sequence[Span], peak_bytes: int | None = None
) -> Timeline | None:
    """Return the step of all ranks on rank 0, from 0 s on; None on the others. Every rank takes part.

    Args:
        spans: of this rank, in ``time.perf_counter`` seconds; ranks of several machines have clocks of their own, so
            only those of one machine can be compared.
        peak_bytes: of activations on this rank, where they were counted.
    """
    told = gather_objects(communicator, ([(str(span.action), span.start_s, span.end_s) for span in spans], peak_bytes))
    if told is None:
        return None
    begun = min((start for rank, _ in told for _, start, _ in rank), default=0.0)
    peaks: Mapping[int, int] = {rank: peak for rank, (_, peak) in enumerate(told) if peak is not None}
    return Timeline(
        {
            rank: tuple(Span(Action.parse(text), start - begun, end - begun) for text, start, end in own)
            for rank, (own, _) in enumerate(told)
        },
        peaks or None,
    )


def measured_costs(timeline: Timeline, stages: int) -> list[StageCost]:
    """Return the costs of the stages of a measured step: medians of each kind of action, or 0 s; bytes are 0."""
    seconds: dict[tuple[int, Kind], list[float]] = defaultdict(list)
    for spans in timeline.spans.values():
        for span in spans:
            seconds[span.action.stage, span.action.kind].append(span.duration_s)

    def usual(stage: int, kind: Kind) -> float:
        durations = seconds[stage, kind]
        return statistics.median(durations) if durations else 0.0

    return [
        StageCost(
            forward_s=usual(stage, Kind.FORWARD),
            backward_s=usual(stage, Kind.BACKWARD),
            backward_input_s=usual(stage, Kind.BACKWARD_INPUT),
            backward_weight_s=usual(stage, Kind.BACKWARD_WEIGHT),
            activation_bytes=0,
        )
        for stage in range(stages)
    ]
