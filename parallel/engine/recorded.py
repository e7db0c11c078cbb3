"""Clock of a rank's device, and the timeline of a step that ran, from the spans of all ranks.

The clock is the host's on a CPU. A host queues the kernels of a GPU ahead of their execution, so there it is timing
events, which tell when the GPU came to them; recording one does not wait for the GPU. With the costs of stages from the
timeline, ``simulate`` returns the best that the same schedule could do.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch

from parallel.comm.communicator import Communicator
from parallel.comm.objects import gather_objects
from parallel.schedule.action import Action, Kind
from parallel.schedule.timeline import Span, StageCost, Timeline

Mark = Any
"""A moment: seconds of ``time.perf_counter`` on a CPU, a ``torch.cuda.Event`` on a GPU."""


class DeviceClock:
    """Moments in the work of one device.

    Attributes:
        mark: returns the moment in which the device has done what the current stream was asked for so far.
        on_gpu: moments are events, which can be waited for.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self.on_gpu = device, device.type == "cuda"
        self.mark: Callable[[], Mark] = self._event if self.on_gpu else time.perf_counter

    def _event(self) -> Mark:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def host_seconds(self, marks: Sequence[Mark]) -> list[float]:
        """Return ``marks`` in seconds of ``time.perf_counter``; waits for a GPU.

        The clocks of a GPU and its host may drift apart by some microseconds for each second since the marks.
        """
        if not self.on_gpu or not marks:
            return list(marks)
        now = self.mark()
        (since_first_s,) = self.durations([(marks[0], now)])
        first_s = time.perf_counter() - since_first_s
        return [first_s + seconds for seconds in self.durations([(marks[0], mark) for mark in marks])]

    def durations(self, pairs: Sequence[tuple[Mark, Mark]]) -> list[float]:
        """Return the seconds between the marks of each pair; waits for a GPU to come to the last mark."""
        if not self.on_gpu or not pairs:
            return [end - start for start, end in pairs]
        pairs[-1][1].synchronize()
        return [start.elapsed_time(end) / 1000 for start, end in pairs]


def gather_timeline(communicator: Communicator, spans: Sequence[Span]) -> Timeline | None:
    """Return the step of all ranks on rank 0, from 0 s on; None on the others. Every rank takes part.

    Args:
        spans: of this rank, in ``time.perf_counter`` seconds; ranks of several machines have clocks of their own, so
            only those of one machine can be compared.
    """
    ranks = gather_objects(communicator, [(str(span.action), span.start_s, span.end_s) for span in spans])
    if ranks is None:
        return None
    begun = min((start for rank in ranks for _, start, _ in rank), default=0.0)
    return Timeline(
        {
            rank: tuple(Span(Action.parse(text), start - begun, end - begun) for text, start, end in own)
            for rank, own in enumerate(ranks)
        }
    )


def measured_costs(timeline: Timeline, stages: int) -> list[StageCost]:
    """Return the costs of the stages of a measured step: medians of each kind of action, or 0 s; bytes are 0."""
    seconds: dict[tuple[int, Kind], list[float]] = defaultdict(list)
    for spans in timeline.spans.values():
        for span in spans:
            seconds[span.action.stage, span.action.kind].append(span.duration_s)

    def usual(stage: int, kind: Kind) -> float:
        return statistics.median(seconds[stage, kind] or [0.0])

    return [
        StageCost(
            forward_s=usual(stage, Kind.FORWARD),
            backward_s=usual(stage, Kind.BACKWARD),
            backward_input_s=usual(stage, Kind.BACKWARD_INPUT),
            backward_weight_s=usual(stage, Kind.BACKWARD_WEIGHT),
            update_s=usual(stage, Kind.UPDATE),
            activation_bytes=0,
        )
        for stage in range(stages)
    ]
