"""Several runs beside each other: one self-contained HTML page made from their folders.

Takes folders of ``app.train``; returns what tells them apart, in settings and environment, and their figures in one
table. What all runs share is left to the report of each, and their curves over each other to TensorBoard.
"""

from __future__ import annotations

import itertools
import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from app.pages.html import Table, flattened, rendered
from app.pages.run_files import RunFiles, naming_the_summary, read_run
from app.pages.run_page import figures_of, scores_of
from app.settings.data_file import write_text

HOW = {"status": "Ended", "strategy": "Strategy", "ranks": "Ranks"}
"""Of ``summary.json``, above the figures that a run's own report has."""

OWN = ("out", "resume")
"""Settings that say nothing of what a run does."""


def write_comparison(runs: Sequence[Path], out: Path) -> Path:
    """Write the page that compares ``runs`` to ``out`` and give its path.

    Raises:
        ValueError: one of them is named twice.
        RunError: one of them is no run folder, or a file in it cannot be understood.
        OSError: the page cannot be written.
    """
    if len({run.resolve() for run in runs}) < len(runs):
        raise ValueError(f"a comparison takes each run once; got {' '.join(map(str, runs))}")
    files = [read_run(run) for run in runs]
    out.parent.mkdir(parents=True, exist_ok=True)
    return write_text(out, render(files, names_of(runs)))


def names_of(runs: Sequence[Path]) -> list[str]:
    """The shortest ends of the folders' paths that tell all of them apart."""
    whole = [run.resolve().parts for run in runs]
    for length in range(1, max(map(len, whole)) + 1):
        names = ["/".join(parts[-length:]) for parts in whole]
        if len(set(names)) == len(names):
            break
    return names


def render(runs: Sequence[RunFiles], names: Sequence[str]) -> str:
    """Return the page."""
    headers = ("", *names)
    return rendered(
        "comparison.html.j2",
        runs=len(runs),
        settings=Table(headers, _differing([run.config for run in runs])),
        figures=Table(headers, _rows([_figures(run) for run in runs])),
        curves=[f"tensorboard --logdir {shlex.quote(os.path.commonpath([run.folder.resolve() for run in runs]))}"],
        environment=Table(headers, _differing([run.environment for run in runs])),
    )


def _figures(run: RunFiles) -> dict[str, str]:
    known = {name: str(run.summary[key]) for key, name in HOW.items() if run.summary.get(key) is not None}
    with naming_the_summary(run.folder):
        return {**known, **dict(figures_of(run)), **dict(scores_of(run))}


def _rows(values: Sequence[Mapping[str, str]]) -> list[list[str]]:
    """A row for each name that a run has a value of; a value that a run does not have is a dash."""
    names = dict.fromkeys(itertools.chain.from_iterable(values))
    return [[name, *(run.get(name, "–") for run in values)] for name in names]


def _differing(values: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Rows of those values that are not the same in all runs."""
    rows = _rows([dict(flattened(run)) for run in values])
    return [row for row in rows if row[0] not in OWN and len(set(row[1:])) > 1]
