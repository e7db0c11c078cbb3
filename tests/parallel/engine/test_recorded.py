"""A measured step is gathered whole, and its costs give the step back when it is simulated."""

from __future__ import annotations

from typing import Any

import pytest

from parallel.comm.communicator import Communicator
from parallel.comm.thread_comm import run_on_threads
from parallel.engine.recorded import gather_timeline, measured_costs
from parallel.schedule.action import Action, Kind
from parallel.schedule.mesh import Mesh
from parallel.schedule.passes import lower
from parallel.schedule.registry import build_schedule
from parallel.schedule.simulate import simulate
from parallel.schedule.timeline import LinkCost, Span, StageCost

COSTS = [StageCost(1.0, 2.0, 1.25, 0.75, 0), StageCost(3.0, 4.0, 2.5, 1.5, 0), StageCost(0.5, 1.0, 0.5, 0.5, 0)]
LINKS = {(0, 1): True, (1, 2): True, (0, 2): True}


def test_every_rank_s_spans_come_together_from_the_first_action_on() -> None:
    def tell(communicator: Communicator, _: Any) -> Any:
        begun = 100.0 + communicator.rank
        spans = [Span(Action(Kind.FORWARD, communicator.rank, 0), begun, begun + 0.5)]
        return gather_timeline(communicator, spans, peak_bytes=communicator.rank + 7)

    first, *others = run_on_threads(3, tell, timeout_s=30)
    assert others == [None, None]
    assert [first.spans[rank][0].start_s for rank in range(3)] == [0.0, 1.0, 2.0]
    assert str(first.spans[2][0].action) == "2F0"
    assert first.peak_bytes == {0: 7, 1: 8, 2: 9}


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zero-bubble", "master"])
def test_the_costs_of_a_step_simulate_to_the_same_step(name: str) -> None:
    mesh = Mesh(1, (0, 1, 2), 2 if name == "master" else 1)
    schedule = lower(build_schedule(name, mesh, 5), mesh, LINKS)
    step = simulate(schedule, mesh, COSTS, dict.fromkeys(LINKS, LinkCost(0.0, 0.0)))
    again = simulate(schedule, mesh, measured_costs(step, 3))
    assert again.makespan_s == pytest.approx(step.makespan_s)
