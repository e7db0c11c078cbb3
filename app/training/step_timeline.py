"""Timeline of the last step in the run folder: schedule, picture and trace.

Takes an engine that splits the model; writes ``schedule.csv``, which the setting ``schedule`` takes back,
``schedule.svg``, the step as simulated from its own stage times above the step as measured, and ``trace.json`` of both
for Perfetto.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

from app.settings.launcher import find_launch
from parallel.comm.communicator import Communicator
from parallel.draw.schedule_svg import schedule_svg
from parallel.engine.engine import Engine
from parallel.engine.recorded import gather_timeline, measured_costs
from parallel.engine.step import TrainingEngine
from parallel.schedule.action import COMPUTE, Kind
from parallel.schedule.mesh import Mesh
from parallel.schedule.simulate import simulate
from parallel.schedule.text import to_csv
from parallel.schedule.timeline import Timeline, chrome_trace
from parallel.strategy import WHOLE


@dataclass(frozen=True)
class StepRecord:
    """One step: as it was measured, and as simulated from its own stage times with messages that take no time.

    Attributes:
        stage_seconds: of each stage, forward and backward of one microbatch, without recomputation of whole stages.
    """

    measured: Timeline
    simulated: Timeline
    stage_seconds: list[float]

    @property
    def seconds(self) -> dict[str, float]:
        """Return the mean seconds of a rank in the measured step: ``compute``; ``bubble``, which the schedule has with
        stages of this duration; ``transfer``, the rest: messages, and waiting for them."""
        measured, simulated = self.measured, self.simulated
        compute = sum(map(measured.busy_s, measured.spans)) / len(measured.spans)
        bubble = max(0.0, min(simulated.bubble * simulated.makespan_s, measured.makespan_s - compute))
        return {"compute": compute, "bubble": bubble, "transfer": measured.makespan_s - compute - bubble}


def write_step(engine: TrainingEngine, communicator: Communicator, name: str, folder: Path) -> StepRecord | None:
    """Write the last step of ``engine`` into ``folder``. Every rank calls it.

    Args:
        name: of the strategy.

    Returns:
        The step, on rank 0 of an engine that splits the model; None elsewhere, and where ranks are on several
        machines, whose clocks differ.
    """
    launch = find_launch()
    if not isinstance(engine, Engine) or name in WHOLE or (launch and launch.local_world < launch.world):
        return None
    measured = gather_timeline(communicator, engine.spans())
    if measured is None or not any(measured.spans.values()):
        return None
    costs = measured_costs(measured, engine.mesh.stages)
    simulated = of_ranks(simulate(engine.schedule, engine.mesh, costs), engine.mesh)
    computed = {
        rank: [action for action in actions if action.kind in COMPUTE and action.kind is not Kind.RECOMPUTE]
        for rank, actions in engine.schedule.items()
    }
    (folder / "schedule.csv").write_text(to_csv(computed))
    teams = [engine.mesh.ranks_of(team) for team in range(engine.mesh.teams)]
    title = f"{name}: simulated from its stage times, and measured"
    picture = schedule_svg(simulated, title=title, compare=measured, teams=teams)
    (folder / "schedule.svg").write_text(picture)
    (folder / "trace.json").write_text(json.dumps(chrome_trace({"simulated": simulated, "measured": measured})))
    seconds = [c.forward_s + (c.backward_s or c.backward_input_s + c.backward_weight_s) for c in costs]
    return StepRecord(measured, simulated, seconds)


def of_ranks(timeline: Timeline, mesh: Mesh) -> Timeline:
    """Return the timeline of every rank from that of every team: the members of a team do the same at the same time."""
    spans = {rank: timeline.spans[mesh.team_of(rank)] for rank in range(mesh.world)}
    return dataclasses.replace(timeline, spans=spans)
