"""What the ranks did in the last step, left in the run folder: schedule, picture and trace.

Takes an engine that splits the model; writes ``schedule.csv``, which ``--schedule`` takes back, ``schedule.svg``, the
step as simulated from its own stage times above the step as measured, and ``trace.json`` of both for Perfetto.
"""

from __future__ import annotations

import json
from pathlib import Path

from app.launcher import find_launch
from parallel.action import COMPUTE, Kind
from parallel.chrome_trace import chrome_trace
from parallel.comm.communicator import Communicator
from parallel.engine import Engine
from parallel.measured import free_links, gather_timeline, measured_costs
from parallel.picture import schedule_svg
from parallel.schedule_file import to_csv
from parallel.simulate import simulate
from parallel.step import TrainingEngine
from parallel.timeline import Timeline


def write_step(engine: TrainingEngine, communicator: Communicator, name: str, folder: Path) -> Timeline | None:
    """Write the last step of ``engine`` into ``folder``. Every rank calls it.

    Args:
        name: of the strategy.

    Returns:
        The measured step, on rank 0 of an engine that splits the model; None elsewhere, and where ranks are on several
        machines, whose clocks differ.
    """
    launch = find_launch()
    if not isinstance(engine, Engine) or (launch and launch.local_world < launch.world):
        return None
    measured = gather_timeline(communicator, engine.spans())
    if measured is None or not any(measured.spans.values()):
        return None
    stages = engine.placement.stages
    simulated = simulate(
        engine.schedule, engine.placement, measured_costs(measured, stages), free_links(engine.schedule, stages)
    )
    computed = {
        rank: [action for action in actions if action.kind in COMPUTE and action.kind is not Kind.RECOMPUTE]
        for rank, actions in engine.schedule.items()
    }
    (folder / "schedule.csv").write_text(to_csv(computed))
    picture = schedule_svg(simulated, title=f"{name}: simulated from its stage times, and measured", compare=measured)
    (folder / "schedule.svg").write_text(picture)
    (folder / "trace.json").write_text(json.dumps(chrome_trace({"simulated": simulated, "measured": measured})))
    return measured
