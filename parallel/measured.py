"""The timeline of a step that really ran, put together from what each rank wrote down."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from parallel.action import Action
from parallel.comm.communicator import Communicator
from parallel.comm.objects import gather_objects
from parallel.timeline import Span, Timeline


def gather_timeline(
    communicator: Communicator, spans: Sequence[Span], peak_bytes: int | None = None
) -> Timeline | None:
    """The step of all ranks on rank 0, from 0 s on; None on the others. Every rank takes part.

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
