"""Cost of stages and links, and timeline of a step: simulated before a run, measured in it, and drawn the same way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from parallel.schedule.action import COMPUTE, Action, Held, Kind, held


@dataclass(frozen=True, slots=True)
class StageCost:
    """Cost of a stage for one microbatch of weight 1.

    Attributes:
        backward_s: of a whole backward pass; the next two are of its halves.
        activation_bytes: kept from a forward pass for its backward pass.
        out_s, back_s: to copy those to the host and back, where they go there.
        update_s: of an update of the parameters, where the schedule has any.
    """

    forward_s: float
    backward_s: float
    backward_input_s: float
    backward_weight_s: float
    activation_bytes: int
    out_s: float = 0.0
    back_s: float = 0.0
    update_s: float = 0.0


@dataclass(frozen=True, slots=True)
class LinkCost:
    """Seconds to pass the values of one microbatch of weight 1 on; nothing between stages on one rank.

    Attributes:
        backward_s: of the gradients; None where none flow back.
    """

    forward_s: float
    backward_s: float | None


def seconds_by_kind(cost: StageCost) -> dict[Kind, float]:
    """Return what each kind of compute action takes."""
    return {
        Kind.FORWARD: cost.forward_s,
        Kind.RECOMPUTE: cost.forward_s,
        Kind.BACKWARD: cost.backward_s,
        Kind.BACKWARD_INPUT: cost.backward_input_s,
        Kind.BACKWARD_WEIGHT: cost.backward_weight_s,
        Kind.UPDATE: cost.update_s,
    }


def peak_bytes(actions: Sequence[Action], costs: Sequence[StageCost], weight: Mapping[int, float]) -> int:
    """Return the most bytes of activations that a rank keeps at any time."""
    now = peak = 0.0
    for action, before, after in held(actions):
        change = (after is Held.ACTIVATIONS) - (before is Held.ACTIVATIONS)
        now += change * costs[action.stage].activation_bytes * weight[action.i]
        peak = max(peak, now)
    return round(peak)


@dataclass(frozen=True, slots=True)
class Span:
    """An action and when it was under way: a message while it travels, a REDUCE while gradients are summed."""

    action: Action
    start_s: float
    end_s: float

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s


@dataclass(frozen=True, slots=True)
class Timeline:
    """One step of all ranks.

    Attributes:
        spans: rank -> what it did, by start; compute actions do not overlap each other, everything else may.
        peak_bytes: rank -> most bytes of activations at any time; None where they were not counted.
    """

    spans: Mapping[int, tuple[Span, ...]]
    peak_bytes: Mapping[int, int] | None = None

    @property
    def start_s(self) -> float:
        """Return the start of the first action of any rank."""
        return min((span.start_s for spans in self.spans.values() for span in spans), default=0.0)

    @property
    def makespan_s(self) -> float:
        """Seconds from the start of the first action to the end of the last, over all ranks; messages and sums
        count."""
        ends = (span.end_s for spans in self.spans.values() for span in spans)
        return max(ends, default=0.0) - self.start_s

    def busy_s(self, rank: int) -> float:
        """Return how long ``rank`` computed."""
        return sum(span.duration_s for span in self.compute(rank))

    def compute(self, rank: int) -> tuple[Span, ...]:
        """Return the compute actions of ``rank``."""
        return tuple(span for span in self.spans[rank] if span.action.kind in COMPUTE)

    @property
    def bubble(self) -> float:
        """Share of the ranks' time in which they do not compute, 0 to 1; 0 for a step without actions."""
        whole = len(self.spans) * self.makespan_s
        return 1 - sum(map(self.busy_s, self.spans)) / whole if whole else 0.0


def chrome_trace(timelines: Mapping[str, Timeline]) -> dict[str, Any]:
    """Return named timelines as a trace for chrome://tracing and ui.perfetto.dev, to zoom into and to measure in.

    In the Trace Event Format of Chrome: a process for each timeline, a thread for each rank, microseconds. Messages and
    sums, which may overlap, are asynchronous slices of the process.
    """
    names: list[dict[str, Any]] = []
    events: list[dict[str, Any]] = []
    for pid, (name, timeline) in enumerate(timelines.items()):
        names.append({"name": "process_name", "ph": "M", "pid": pid, "args": {"name": name}})
        zero_s = timeline.start_s
        for rank, spans in timeline.spans.items():
            names.append({"name": "thread_name", "ph": "M", "pid": pid, "tid": rank, "args": {"name": f"rank {rank}"}})
            for number, span in enumerate(spans):
                action, (start_us, end_us) = span.action, ((s - zero_s) * 1e6 for s in (span.start_s, span.end_s))
                args = {"stage": action.stage, "microbatch": action.microbatch, "replica": action.replica}
                event = {"name": str(action), "pid": pid, "tid": rank, "args": args, "ts": start_us}
                if action.kind in COMPUTE:
                    events.append({**event, "cat": "compute", "ph": "X", "dur": end_us - start_us})
                else:
                    args["peer"] = action.peer
                    event |= {"cat": "exchange", "id": f"{rank}.{number}"}
                    events += [{**event, "ph": "b"}, {**event, "ph": "e", "ts": end_us}]
    return {"traceEvents": names + sorted(events, key=lambda event: event["ts"]), "displayTimeUnit": "ms"}
