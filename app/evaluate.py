"""``python -m app.evaluate``: predictions of ``app.predict`` held against the truth.

Takes a folder of predictions with a table of labels, annotations, or both; leaves ``evaluation.json`` and
``report.html``: areas under curves with intervals over patients, confusion, calibration; Dice, IoU and lesions found.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from app.settings.cli import run_command


@dataclass(frozen=True)
class EvaluateCommand:
    """Hold predictions against the truth: scores of slides and patients, areas, lesions, on one page."""

    predictions: Path
    """Folder that app.predict wrote."""
    labels: Path | None = None
    """CSV with columns slide, label and optionally patient: slides and patients are scored."""
    annotations: Path | None = None
    """Folder of annotations by slide name, as app.train takes them: areas and lesions are scored."""
    slides: Path | None = None
    """Folder of the slides: the report then shows the tiles that the model is most and least certain of."""
    out: Path | None = None
    """Folder for evaluation.json and report.html; that of the predictions by default."""

    def validate(self) -> list[str]:
        if self.labels is None and self.annotations is None:
            return ["there is nothing to hold predictions against: give --labels FILE.csv, --annotations DIR, or both"]
        return []


def evaluate(command: EvaluateCommand) -> None:
    """Score, write and say what was found."""
    from app.evaluation.report import Evaluation, write_report
    from app.prediction.prediction_folder import PredictionFolder

    folder = PredictionFolder(command.predictions)
    evaluation = Evaluation.of(folder, command.labels, command.annotations)
    out = command.out or command.predictions
    out.mkdir(parents=True, exist_ok=True)
    figures = evaluation.figures()
    temporary = out / "evaluation.json.tmp"
    temporary.write_text(json.dumps(figures, indent=2, allow_nan=False) + "\n")
    temporary.replace(out / "evaluation.json")
    page = write_report(evaluation, folder, out / "report.html", command.slides)
    for line in evaluation.lines():
        print(line)
    print(f"scores  {out / 'evaluation.json'}\nreport  {page}")


def main(argv: Sequence[str] | None = None) -> int:
    return run_command(EvaluateCommand, evaluate, argv, prog="python -m app.evaluate")


if __name__ == "__main__":
    sys.exit(main())
