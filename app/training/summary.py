"""The end of a run: ``summary.json``, the report page, and the lines a user reads.

Takes the session and where it stands; every figure is counted or measured in this run, none is assumed.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from app.pages.run_page import write_report
from app.planning.auto import planned_speed
from app.settings.launcher import find_launch
from app.training.example_pictures import predicted_masks, write_examples
from app.training.loop import TrainingLoop
from app.training.metrics_log import staleness_in
from app.training.outcome import excess, peak_resident_bytes
from app.training.resharing import changes_in
from app.training.run_folder import RunFolder
from app.training.session import Session
from parallel.comm.communicator import Communicator
from parallel.draw.schedule_svg import schedule_svg
from parallel.engine.engine import Engine
from parallel.engine.recorded import gather_timeline, measured_costs
from parallel.engine.step import TrainingEngine
from parallel.schedule.action import COMPUTE, Kind
from parallel.schedule.simulate import simulate
from parallel.schedule.text import to_csv
from parallel.schedule.timeline import chrome_trace
from parallel.strategy import DELAYED, WHOLE
from parallel.units import number_text
from pipelines.cache.tile_cache import CacheCounts
from pipelines.catalog.table import counted
from pipelines.tiles.tile_table import three_sizes

log = logging.getLogger(__name__)


STEP = ("bubble", "bubble_predicted", "step_seconds", "stage_seconds")
"""Figures of the last step in ``summary.json``."""


def write_step(engine: TrainingEngine, communicator: Communicator, name: str, folder: Path) -> dict[str, Any] | None:
    """Write the last step of ``engine`` into ``folder``, as it was measured, and as simulated from its own stage times
    with messages that take no time. Every rank calls it.

    Returns:
        ``STEP``, on rank 0 of an engine that splits the model; None elsewhere, and where ranks are on several machines,
        whose clocks differ. ``step_seconds`` are means of a rank: ``compute``; ``bubble``, which the schedule has with
        stages of this duration; ``transfer``, the rest: messages, and waiting for them. ``stage_seconds`` are forward
        and backward of one microbatch, without recomputation of whole stages.
    """
    launch = find_launch()
    if not isinstance(engine, Engine) or name in WHOLE or (launch and launch.local_world < launch.world):
        return None
    measured = gather_timeline(communicator, engine.spans())
    if measured is None or not any(measured.spans.values()):
        return None
    costs = measured_costs(measured, engine.mesh.stages)
    simulated = simulate(engine.schedule, engine.mesh, costs)
    # The members of a team do the same at the same time.
    spans = {rank: simulated.spans[engine.mesh.team_of(rank)] for rank in range(engine.mesh.world)}
    simulated = dataclasses.replace(simulated, spans=spans)
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
    stages = [c.forward_s + (c.backward_s or c.backward_input_s + c.backward_weight_s) for c in costs]
    compute = sum(map(measured.busy_s, measured.spans)) / len(measured.spans)
    bubble = max(0.0, min(simulated.bubble * simulated.makespan_s, measured.makespan_s - compute))
    seconds = {"compute": compute, "bubble": bubble, "transfer": measured.makespan_s - compute - bubble}
    return dict(zip(STEP, (measured.bubble, simulated.bubble, seconds, stages), strict=True))


class RunSummary:
    """Writes what is left of a run; silent on all ranks but the first.

    Args:
        restarts: attempts of the same start before this one.
    """

    def __init__(self, session: Session, folder: RunFolder, loop: TrainingLoop, restarts: int) -> None:
        self._session, self._folder, self._restarts = session, folder, restarts
        self._outcome, self._memory, self._mlflow = loop.outcome, loop.memory, loop.mlflow
        self._started_s = time.monotonic()
        self._communicator = session.placement.communicator
        self._cached = CacheCounts() if session.cache is None else session.cache.counts

    def say(self, line: str) -> None:
        if self._communicator.rank == 0:
            print(line, flush=True)

    def finished(self, peak_bytes: int) -> None:
        """The run came to its end, or was interrupted and saved. Called by all ranks."""
        session = self._session
        own = [*self._peaks(peak_bytes), session.engine.sent_in_step]
        peaks = self._communicator.all_gather(torch.tensor(own)).T
        if session.cache is not None:
            counts = torch.tensor(dataclasses.astuple(self._cached), dtype=torch.float64)
            self._communicator.all_reduce(counts)
            self._cached = CacheCounts.of(counts.tolist())
        step = write_step(session.engine, self._communicator, session.strategy.name, self._folder.path)
        # After an interruption the weights are not those that were validated.
        shown = self._outcome.examples if self._outcome.status == "completed" else ()
        masks = predicted_masks(session, shown)
        if self._communicator.rank == 0:
            examples = write_examples(session, shown, masks, self._folder.path)
            self._write(self._outcome.status, peaks.tolist(), None, step, examples)

    def fed_from_memory(self, images_per_second: float | None) -> None:
        """Add the speed of the same step fed from memory to the summary of a finished run."""
        if self._communicator.rank == 0:
            summary = json.loads(self._folder.summary.read_text())
            self._folder.write_json("summary.json", summary | {"images_per_second_no_data": images_per_second})
            write_report(self._folder.path)
            self.say(f"fed from memory: {number_text(images_per_second, '.3f')} images/s")

    def failed(self, error: str, peak_bytes: int) -> None:
        """The run ended with ``error``. Asks nothing of the other ranks: they may be gone."""
        if self._communicator.rank == 0:
            self._write("failed", [*([size] for size in self._peaks(peak_bytes)), []], error)

    def _peaks(self, peak_bytes: int) -> list[int]:
        """Return the most bytes: ``peak_bytes``, resident, on the device, of tiles and maps in memory and in files."""
        host = self._session.host
        on_host = [host.peak_bytes, host.peak_file_bytes] if host else [0, 0]
        return [peak_bytes, peak_resident_bytes(), self._memory.device_bytes or 0, *on_host]

    def _write(
        self,
        status: str,
        peaks: list[list[int]],
        error: str | None,
        step: dict[str, Any] | None = None,
        examples: Sequence[dict[str, Any]] = (),
    ) -> None:
        summary = {**self._figures(status, peaks, error), **(step or dict.fromkeys(STEP)), "examples": list(examples)}
        self._folder.write_json("summary.json", summary)
        page = write_report(self._folder.path)
        speed = summary["images_per_second"]
        did = f"{counted(summary['steps'], 'step')}, {counted(summary['images'], 'tile')}"
        planned = planned_speed(self._folder.path, summary["strategy"]) if speed else None
        beside = f"; planned {planned:.3f} ({speed / planned - 1:+.0%})" if planned else ""
        self.say(f"{status}: {did}, {number_text(speed, '.3f')} images/s{beside}")
        if idle := summary["idle_fraction"]:
            each = ", ".join(f"rank {rank} {fraction:.1%}" for rank, fraction in enumerate(idle))
            self.say(f"ranks waited for each other {sum(idle) / len(idle):.1%} of the time: {each}")
        if early := summary["stopped_early"]:
            best = ""
            if "best_step" in early:
                best = f" than {early['best_metric']} {early['best_value']:.4f} of step {early['best_step']}"
            self.say(
                f"stopped early at step {early['step']}: {early['validations']} validations in a row without a better "
                f"score{best} (--patience {early['patience']})"
            )
        if self._session.cache is not None:
            counts, cache = self._cached, self._session.cache
            damaged = f", {counts.damaged} damaged" if counts.damaged else ""
            full = f"; nothing more is kept: {cache.full}" if cache.full else ""
            hits = f"{counts.hits} of {counts.hits + counts.misses} tiles read from it{damaged}"
            self.say(f"tile cache {cache.folder}: {hits}, {counts.stored} added{full}")
        if status != "failed":
            self.say(f"checkpoint {summary['checkpoint']}")
        self.say(f"report {page}")
        if warning := excess(self._memory.limit, peaks[2]):
            log.warning(warning)
        if self._mlflow is not None:
            self._mlflow.close(status)

    def _figures(self, status: str, peaks: list[list[int]], error: str | None) -> dict[str, Any]:
        session, outcome = self._session, self._outcome
        config, strategy, tiles = session.config, session.strategy, session.dataset.tiles
        speed = outcome.throughput.images_per_second
        peak, resident, device, in_memory, in_files, sent = peaks
        return {
            "status": status,
            "error": error,
            "task": session.dataset.task,
            "classes": list(session.dataset.classes),
            "model": config.net.model,
            "parameters": session.model.parameters,
            "weights": session.model.loaded.summary if session.model.loaded else None,
            "strategy": strategy.name,
            "gradients": DELAYED if strategy.delayed else None,
            "staleness": staleness_in(self._folder.pushes) if strategy.pushes else None,
            "ranks": self._communicator.world,
            "stages": strategy.depth,
            "grid": str(strategy.grid) if strategy.grid else None,
            "shares": [list(share) for share in outcome.shares or strategy.shares] or None,
            "share_changes": changes_in(self._folder.shares),
            "recompute": strategy.policy.recompute,
            "offload": strategy.policy.offload,
            "offload_state": strategy.policy.state,
            "stream_px": strategy.policy.stream,
            "device": str(session.placement.device),
            "precision": session.placement.precision,
            "global_batch": config.strategy.batch,
            "microbatches": len(session.ranges),
            "tile_px": config.index.tile,
            "tile_sides_px": three_sizes(tiles) if tiles.sides is not None else None,
            "mpp": config.index.mpp,
            "steps": outcome.step,
            "images": outcome.images,
            "tiles_replaced": outcome.replaced,
            "validation_tiles": outcome.validation.get("tiles", 0),
            "validation_tiles_unreadable": outcome.validation.get("unreadable", 0),
            "slides_without_score": outcome.validation.get("unscored", []),
            "images_per_second": speed,
            "images_per_second_sustained": outcome.throughput.images_per_second_sustained,
            "images_per_second_no_data": None,
            "pixels_per_second": None if speed is None else speed * float(tiles.pixels[session.train_rows].mean()),
            "data_wait_fraction": outcome.throughput.data_wait_fraction,
            "idle_fraction": outcome.idle.fractions,
            "tile_cache": session.cache and {**dataclasses.asdict(self._cached), "full": session.cache.full},
            "peak_memory_bytes": peak,
            "peak_resident_bytes": resident,
            "device_bytes": device if any(device) else None,
            "host_bytes": in_memory if session.host else None,
            "file_bytes": in_files if session.host else None,
            "memory_limit_bytes": self._memory.limit,
            "sent_bytes": sent or None,
            "final_loss": outcome.loss,
            "metrics": outcome.metrics,
            "best": outcome.best,
            "stopped_early": outcome.stopped_early(config.score.patience, session.total_steps),
            "checkpoint": str(self._folder.last) if self._folder.last.exists() else None,
            "wall_s": time.monotonic() - self._started_s,
            "restarts": self._restarts,
        }
