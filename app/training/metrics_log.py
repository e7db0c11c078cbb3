"""Measurements of a run, step by step: metrics.csv, validation.csv, predictions.csv, pushes.csv, TensorBoard, MLflow.

Written by the first rank only; on the others every method does nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Self

from app.training.mlflow_log import MlflowLog
from app.training.push_log import PushLog
from app.training.run_folder import CsvLog, RunFolder
from app.training.validation import Scores
from parallel.engine.step import StepResult
from pipelines.catalog.failures import names_file
from pipelines.catalog.table import write_rows

if TYPE_CHECKING:
    from app.training.session import Session

STEP_COLUMNS = ("step", "epoch", "images", "loss", "lr", "step_s", "data_wait_s", "images_per_second")
VALIDATION_COLUMNS = (
    "step",
    "loss",
    "tile_auc",
    "slide_auc",
    "slide_balanced_accuracy",
    "tile_balanced_accuracy",
    "dice",
)


class MetricsLog:
    """The growing files of one run.

    Args:
        folder: where they are.
        step: steps done when the run starts; rows after it are dropped, they will be computed again.
        classes: names, for the columns of Dice.
        writes: whether this rank writes.
        mlflow: told the same scalars.

    Attributes:
        dropped: steps whose rows were dropped.
    """

    def __init__(
        self, folder: RunFolder, step: int, classes: Sequence[str], writes: bool, mlflow: MlflowLog | None = None
    ) -> None:
        self._writes = writes
        self._mlflow = mlflow
        self.dropped = 0
        if not writes:
            return
        from torch.utils.tensorboard import SummaryWriter  # which ranks that do not write need not load

        self._predictions = folder.predictions
        self._steps = CsvLog(folder.metrics, STEP_COLUMNS)
        self._validations = CsvLog(folder.validation, [*VALIDATION_COLUMNS, *(f"dice_{name}" for name in classes)])
        self.dropped = self._steps.cut_after(step)
        self._validations.cut_after(step)
        self._pushes = PushLog(folder.pushes, step)
        # purge_step makes TensorBoard forget what an earlier start wrote beyond the checkpoint.
        self._events = SummaryWriter(folder.path / "tensorboard", purge_step=step + 1)

    def step(self, step: int, images: int, result: StepResult, step_s: float, wait_s: float, session: Session) -> None:
        """``step`` steps are done; times in seconds, ``images`` counted since the run began."""
        if not self._writes:
            return
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
        self._pushes.add(result.pushes)
        self._scalars(step, {f"train/{name}": row[name] for name in ("loss", "lr", "images_per_second")})

    def validation(self, step: int, scores: Scores) -> None:
        """Scores after ``step`` steps; the table of predictions is that of the last validation."""
        if not self._writes:
            return
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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._writes:
            self._events.close()
