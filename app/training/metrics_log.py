"""Measurements of a run, step by step: metrics.csv, validation.csv, predictions.csv, pushes.csv, TensorBoard, MLflow.

The first rank alone writes them.
"""

from __future__ import annotations

import csv
import json
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.training.run_folder import CsvLog, RunFolder
from app.training.validation import Scores
from parallel.engine.step import StepResult
from parallel.schedule.text import Push
from pipelines.catalog.table import names_file, write_rows

if TYPE_CHECKING:
    from app.training.session import Session

log = logging.getLogger(__name__)
RUN_FILE = "mlflow.json"
ARTEFACTS = (
    *("config.yaml", "env.json", "summary.json", "report.html"),
    *("metrics.csv", "validation.csv", "predictions.csv", "splits.csv", "failed_slides.csv"),
)
"""What is sent when the run has ended, where it is there. Checkpoints stay: they may be of any size."""
ENDED = {"completed": "FINISHED", "interrupted": "KILLED", "failed": "FAILED"}
"""MLflow's words for how a run ended."""
SEND_EVERY_S, RETRY_S, CLOSE_S = 2.0, 30.0, 60.0
"""Seconds between two messages, after one that failed, and that the end of a run waits for the last of them."""
MOST_METRICS, MOST_PARAMS, LONGEST_PARAM = 1000, 100, 500
"""What one message may hold, and characters of a setting, by MLflow's interface."""
MOST_WAITING = 200_000
"""Scalars kept for a server that is not there; the oldest are dropped."""
STEP_COLUMNS = ("step", "epoch", "images", "loss", "lr", "step_s", "data_wait_s", "images_per_second")
VALIDATION_COLUMNS = (
    *("step", "loss", "tile_auc", "slide_auc", "slide_balanced_accuracy", "tile_balanced_accuracy", "dice"),
)


def staleness_in(path: Path) -> dict[int, int] | None:
    """Return how many updates of the run had each staleness, rising; None: there is no parameter server."""
    if not path.exists():
        return None
    with path.open(newline="") as file:
        counts = Counter(int(row["staleness"]) for row in csv.DictReader(file))
    return dict(sorted(counts.items()))


class MlflowLog:
    """One run of MLflow, updated from a thread of its own.

    Args:
        folder: of the run; its name is the run's.
        experiment: made where there is none of that name.
        settings: logged as parameters when the run is new.
    """

    def __init__(self, folder: Path, experiment: str, settings: Mapping[str, Any]) -> None:
        self._folder, self._experiment, self._settings = folder, experiment, settings
        self._waiting: deque[tuple[str, float, int, int]] = deque(maxlen=MOST_WAITING)
        self._sending: list[tuple[str, float, int, int]] = []
        """Taken from those that wait, and kept until a server has them."""
        self._lock = threading.Lock()
        self._dropped = 0
        self._params: list[tuple[str, str]] = []
        self._last: list[Callable[[Any, str], None]] = []
        self._wakes = threading.Event()
        self._closes = self._warned = False
        self._thread: threading.Thread | None = None

    def scalars(self, step: int, values: Mapping[str, float | None]) -> None:
        """Log ``values`` after ``step`` steps; None is left out."""
        now_ms = int(time.time() * 1000)
        new = [(name, float(value), now_ms, step) for name, value in values.items() if value is not None]
        with self._lock:
            self._dropped += max(0, len(self._waiting) + len(new) - MOST_WAITING)
            self._waiting.extend(new)
        self._start()

    def _start(self) -> threading.Thread:
        """The thread, which a run that has nothing to tell never needs."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._tell, name="mlflow", daemon=True)
            self._thread.start()
        return self._thread

    def close(self, status: str) -> None:
        """Send what is waiting, the files of the run and how it ended (completed, interrupted, failed); after
        ``CLOSE_S`` the rest is given up."""
        self._last = [self._send_files, lambda client, run: client.set_terminated(run, ENDED[status])]
        self._closes = True
        self._wakes.set()
        self._start().join(CLOSE_S)
        lost = self._dropped + len(self._sending) + len(self._waiting)
        if lost or self._last:
            files = " and the last files" if self._last else ""
            log.warning("MLflow did not get %d scalars%s; all are in %s", lost, files, self._folder)

    def _tell(self) -> None:
        """Until closed: open the run, then send what is waiting; whatever fails is tried again later."""
        client, run = None, ""
        while True:
            try:
                if client is None:
                    client, run = self._open()
                while self._params or self._sending or self._waiting:
                    self._send(client, run)
                while self._last:
                    self._last[0](client, run)
                    del self._last[0]
                failed = False
            except Exception as fault:  # clients raise anything, and a run does not end for it
                if not self._warned:
                    log.warning("MLflow cannot be reached, and is tried again every %g s: %s", RETRY_S, fault)
                self._warned = failed = True
            if self._closes and (failed or not self._last):
                return
            self._wakes.wait(RETRY_S if failed else SEND_EVERY_S)

    def _open(self) -> tuple[Any, str]:
        """A client, and the number of the run: that of ``mlflow.json``, or of a new one with the settings."""
        from mlflow import MlflowClient

        client = MlflowClient()
        kept = self._folder / RUN_FILE
        if kept.exists():
            run: str = json.loads(kept.read_text())["run_id"]
            client.update_run(run, status="RUNNING")
            return client, run
        known = client.get_experiment_by_name(self._experiment)
        number = known.experiment_id if known else client.create_experiment(self._experiment)
        run = client.create_run(number, run_name=self._folder.resolve().name).info.run_id
        kept.write_text(json.dumps({"experiment": self._experiment, "run_id": run}) + "\n")
        self._params = [(name, str(value)[:LONGEST_PARAM]) for name, value in self._settings.items()]
        return client, run

    def _send(self, client: Any, run: str) -> None:
        """One message: of settings, if any are left, or of scalars."""
        from mlflow.entities import Metric, Param

        if self._params:
            client.log_batch(run, params=[Param(*param) for param in self._params[:MOST_PARAMS]])
            del self._params[:MOST_PARAMS]
            return
        with self._lock:
            while self._waiting and len(self._sending) < MOST_METRICS:
                self._sending.append(self._waiting.popleft())
        client.log_batch(run, metrics=[Metric(*scalar) for scalar in self._sending])
        self._sending = []

    def _send_files(self, client: Any, run: str) -> None:
        for name in ARTEFACTS:
            if (self._folder / name).exists():
                client.log_artifact(run, str(self._folder / name))


class MetricsLog:
    """The growing files of one run.

    Args:
        step: steps done when the run starts; rows after it are dropped, as these steps are repeated.
        classes: names, for the columns of Dice.

    Attributes:
        dropped: steps whose rows were dropped.
    """

    def __init__(self, folder: RunFolder, step: int, classes: Sequence[str], mlflow: MlflowLog | None = None) -> None:
        self._mlflow = mlflow
        from torch.utils.tensorboard import SummaryWriter  # which ranks that do not write need not load

        self._predictions = folder.predictions
        self._steps = CsvLog(folder.metrics, STEP_COLUMNS)
        self._validations = CsvLog(folder.validation, [*VALIDATION_COLUMNS, *(f"dice_{name}" for name in classes)])
        self.dropped = self._steps.cut_after(step)
        self._validations.cut_after(step)
        self._pushes = folder.pushes
        if folder.pushes.exists():
            CsvLog(folder.pushes, Push._fields).cut_after(step - 1)  # the log counts steps from 0
        # purge_step makes TensorBoard forget what an earlier start wrote beyond the checkpoint.
        self._events = SummaryWriter(folder.path / "tensorboard", purge_step=step + 1)

    def step(self, step: int, images: int, result: StepResult, step_s: float, wait_s: float, session: Session) -> None:
        """``step`` steps are done; times in seconds, ``images`` counted since the run began."""
        row = {
            "step": step,
            "epoch": session.epoch_of(step - 1),
            "images": images,
            "loss": result.loss,
            "lr": session.learning_rate(step - 1),
            "step_s": round(step_s, 6),
            "data_wait_s": round(wait_s, 6),
            "images_per_second": round(session.config.strategy.batch / step_s, 4),
        }
        self._steps.add(row)
        for push in result.pushes:
            CsvLog(self._pushes, Push._fields).add(push._asdict())
        self._scalars(step, {f"train/{name}": row[name] for name in ("loss", "lr", "images_per_second")})

    def validation(self, step: int, scores: Scores) -> None:
        """Scores after ``step`` steps; the table of predictions is that of the last validation."""
        self._validations.add({"step": step, **scores.metrics})
        self._scalars(step, {f"validation/{name}": value for name, value in scores.metrics.items()})
        table = self._predictions
        with names_file(table), table.open("w", newline="", encoding="utf-8", errors="surrogateescape") as file:
            write_rows(file, [list(scores.predictions[0]), *(list(row.values()) for row in scores.predictions)])

    def _scalars(self, step: int, values: Mapping[str, float | None]) -> None:
        """Curves of TensorBoard and MLflow; None is left out."""
        for name, value in values.items():
            if value is not None:
                self._events.add_scalar(name, value, step)
        if self._mlflow is not None:
            self._mlflow.scalars(step, values)

    def close(self) -> None:
        self._events.close()
