"""``python -m app.evaluate``: predictions of ``app.predict`` compared with the truth.

Takes a folder of predictions with a table of labels, annotations, or both; leaves ``evaluation.json`` and
``report.html`` for one split of the run: areas under curves with intervals over patients, confusion, calibration; Dice,
IoU and lesions found.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from app.settings.cli import run_command
from app.settings.fields import write_json
from pipelines.labels.class_names import pattern_fault


@dataclass(frozen=True)
class EvaluateCommand:
    """Compare predictions with the truth: scores of slides and patients, areas, lesions, on one page."""

    predictions: Path
    """Folder that app.predict wrote."""
    labels: Path | None = None
    """CSV with columns slide, label and optionally patient: slides and patients are scored. With --annotations it may
    name patients alone."""
    annotations: Path | None = None
    """Folder of annotations by slide name, as app.train takes them: areas and lesions are scored."""
    split: Literal["train", "val", "test", "external", "all"] | None = None
    """Predicted slides to score, by split of the run. Default: test slides, else validation, else external ones."""
    patient_pattern: str | None = None
    """Regular expression whose first group is the patient in slide names, as '^(P[0-9]+)_'. Default: the run's."""
    positive_class: str | None = None
    """Positive class of two. Default: that of the run, else the one not called normal, benign, negative or 0."""
    slides: Path | None = None
    """Folder of the slides: the report then shows the tiles that the model is most and least certain of."""
    out: Path | None = None
    """Folder for evaluation.json and report.html; that of the predictions by default."""

    def validate(self) -> list[str]:
        if self.labels is None and self.annotations is None:
            return ["nothing to evaluate: give --labels FILE.csv, --annotations DIR, or both"]
        fault = pattern_fault(self.patient_pattern)
        return [] if fault is None else [fault]


def evaluate(command: EvaluateCommand) -> None:
    from app.evaluation.report import Evaluation
    from app.evaluation.report_page import write_report
    from app.prediction.prediction_folder import PredictionFolder

    folder = PredictionFolder(command.predictions)
    asked = command.split, command.patient_pattern, command.positive_class
    evaluation = Evaluation(folder, command.labels, command.annotations, *asked)
    out = command.out or command.predictions
    out.mkdir(parents=True, exist_ok=True)
    scores = write_json(out / "evaluation.json", evaluation.figures())
    page = write_report(evaluation, folder, out / "report.html", command.slides)
    for line in evaluation.lines():
        print(line)
    print(f"scores  {scores}\nreport  {page}")


def main(argv: Sequence[str] | None = None) -> int:
    return run_command(EvaluateCommand, evaluate, argv, prog="python -m app.evaluate")


if __name__ == "__main__":
    sys.exit(main())
