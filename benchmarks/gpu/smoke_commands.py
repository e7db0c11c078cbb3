"""Rows of the smoke part that are commands as a user types them: training, resuming and prediction on synthetic slides.

Takes a device and a folder for slides and runs; gives a row per case. Each command is a process of its own.
"""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

from benchmarks.gpu.setting import Row, Setting
from benchmarks.results import ROOT

MODEL = "benchmarks.gpu.smoke_engines:dropping"
STEPS = 4
TRAIN = f"--model {MODEL} --tile 64 --batch 4 --microbatches 2 --precision fp32 --validation 0 --steps {STEPS}"
TRAIN += " --checkpoint-every 1 --twin-steps=0"
ALLOWED = 1e-3
"""Largest relative error of a loss, and error of a score, of two runs that should be the same: kernels may differ."""
STOP_AFTER = "SMOKE_STOP_AFTER"
"""Variable with the number of updates after which ``smoke_engines.dropping`` asks its process to stop."""
NONE: Mapping[str, str] = MappingProxyType({})
Run = Callable[..., "subprocess.CompletedProcess[str]"]


class Commands:
    """The commands of one smoke test.

    Args:
        folder: for slides and runs, which later cases compare themselves with.
        run: runs ``python -m module words`` as ``run_process`` does.
    """

    def __init__(self, setting: Setting, folder: Path, run: Run) -> None:
        self._setting, self._folder, self._run = setting, folder, run

    def resume(self, name: str, of: str = "whole", env: Mapping[str, str] = NONE) -> Row:
        """Train as ``of`` in one go; train, stop, and resume on one rank with variables ``env``: the same losses."""
        whole, run = self._trained(of), self._folder / name
        self._train(run, of, env={STOP_AFTER: str(STEPS // 2)})
        self._train(run, "whole", "--resume", env=env)
        return _compared(*(_columns(folder / "metrics.csv", "loss") for folder in (whole, run)))

    def resume_on_fewer(self, name: str) -> Row:
        """Train on all GPUs, and resume where only the first is visible."""
        return self.resume(name, "whole-ddp", {"CUDA_VISIBLE_DEVICES": "0"})

    def predict(self, name: str, ranks: int) -> Row:
        """Predict on ranks that hold a stage each: the scores of one rank."""
        checkpoint = self._trained("whole") / "checkpoints" / "last.pt"
        found = []
        for out, more in (("predict-1", ()), (name, ("--ranks", str(ranks), "--stages", "2"))):
            if not (self._folder / out).exists():
                self._call("app.predict", *self._words(self._folder / out, checkpoint), *more)
            found.append(_columns(self._folder / out / "slides.csv", "score_"))
        return _compared(*found)

    def _trained(self, name: str) -> Path:
        run = self._folder / name
        if not run.exists():
            self._train(run, name)
        return run

    def _train(self, run: Path, way: str, *more: str, env: Mapping[str, str] = NONE) -> None:
        parallel = "--parallel ddp --ranks 2" if way == "whole-ddp" else "--parallel single"
        self._call("app.train", *self._words(run), *TRAIN.split(), *parallel.split(), *more, env=env)

    def _words(self, out: Path, checkpoint: Path | None = None) -> list[str | Path]:
        slides = self._folder / "slides"
        if not slides.exists():
            self._call("app.synth", slides, "--slides", "4", "--size", "512")
        words: list[str | Path] = ["--slides", slides, "--device", self._setting.device.type, "--out", out]
        return words if checkpoint is None else [*words, "--checkpoint", checkpoint, "--model", MODEL]

    def _call(self, module: str, *words: str | Path, env: Mapping[str, str] = NONE) -> None:
        done = self._run(module, *words, env=env, limit_s=max(20.0, self._setting.left_s))
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if "rror" in line] or done.stderr.splitlines()[-1:]
            raise RuntimeError(f"{module} ended with exit code {done.returncode}: {(lines or ['nothing said'])[0]}")


def run_process(
    module: str, *words: str | Path, env: Mapping[str, str], limit_s: float
) -> subprocess.CompletedProcess[str]:
    """Run ``python -m module words``.

    Raises:
        TimeoutExpired: it took longer than ``limit_s``.
    """
    return subprocess.run(
        [sys.executable, "-m", module, *map(str, words)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", **env},
        capture_output=True,
        text=True,
        timeout=limit_s,
    )


def _columns(path: Path, beginning: str) -> list[float]:
    """Return the numbers of all columns whose names begin so."""
    with path.open() as file:
        rows = list(csv.DictReader(file))
    return [float(value) for row in rows for name, value in row.items() if name.startswith(beginning)]


def _compared(expected: list[float], found: list[float]) -> Row:
    error = max(abs(ours - theirs) / max(abs(theirs), 1e-9) for theirs, ours in zip(expected, found, strict=True))
    return {"error": error, "allowed": ALLOWED, "passed": error <= ALLOWED}
