"""Timelines as a trace for chrome://tracing and ui.perfetto.dev, to zoom into and to measure in.

Takes named timelines, such as one simulated and one measured; gives the object that ``json.dump`` writes, in the Trace
Event Format of Chrome: a process for each timeline, a thread for each rank. Compute actions are slices of the thread.
Messages and sums, which may overlap, are asynchronous slices of the process.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from parallel.schedule.action import COMPUTE
from parallel.schedule.timeline import Span, Timeline


def chrome_trace(timelines: Mapping[str, Timeline]) -> dict[str, Any]:
    """Events in the order of their times, every timeline from 0 on; times in the format's unit, microseconds."""
    names: list[dict[str, Any]] = []
    events: list[dict[str, Any]] = []
    for pid, (name, timeline) in enumerate(timelines.items()):
        names.append({"name": "process_name", "ph": "M", "pid": pid, "args": {"name": name}})
        for rank, spans in timeline.spans.items():
            names.append({"name": "thread_name", "ph": "M", "pid": pid, "tid": rank, "args": {"name": f"rank {rank}"}})
            for number, span in enumerate(spans):
                for event in _events(span, timeline.start_s, f"{rank}.{number}"):
                    events.append({**event, "pid": pid, "tid": rank})
    return {"traceEvents": names + sorted(events, key=lambda event: event["ts"]), "displayTimeUnit": "ms"}


def _events(span: Span, zero_s: float, number: str) -> Iterator[dict[str, Any]]:
    """One event for a slice of a thread, beginning and end for an asynchronous one."""
    action = span.action
    args = {"stage": action.stage, "microbatch": action.microbatch, "replica": action.replica}
    start_us, end_us = ((time_s - zero_s) * 1e6 for time_s in (span.start_s, span.end_s))
    if action.kind in COMPUTE:
        event = {"name": str(action), "cat": "compute", "args": args}
        yield {**event, "ph": "X", "ts": start_us, "dur": end_us - start_us}
    else:
        event = {"name": str(action), "cat": "exchange", "args": {**args, "peer": action.peer}, "id": number}
        yield {**event, "ph": "b", "ts": start_us}
        yield {**event, "ph": "e", "ts": end_us}
