"""Runs of ``app.train``, and rows of tables, that are kept when a command is run again; bytes of a run by plan."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from app.planning.machine import this_machine
from app.planning.workload import Workload
from benchmarks.results import read_json, write_json
from benchmarks.timing import run_app
from parallel.plan.search import Planner
from parallel.strategy import Strategy


def measured(name: str, cases: Mapping[str, Callable[[], dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return a row for each case. Those in ``bench-data/NAME.json`` are taken from there; others are added at once."""
    rows = read_json(name)
    for case, measure in cases.items():
        if case not in rows:
            rows[case] = measure()
            write_json(name, rows)
            print(case, {key: value for key, value in rows[case].items() if isinstance(value, float)}, flush=True)
    return [rows[case] for case in cases]


def train(slides: Path, out: Path, *arguments: str, env: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return the summary of one run of ``app.train``, which is not repeated if ``out`` holds a completed one."""
    if not completed(out):
        shutil.rmtree(out, ignore_errors=True)
        run_app("app.train", "--slides", str(slides), "--out", str(out), *arguments, quiet=False, env=env)
        if not completed(out):  # app.train exits with 0 when it is asked to stop
            raise SystemExit(f"{out} was interrupted; run the same command again")
    summary: dict[str, Any] = json.loads((out / "summary.json").read_text())
    return summary


def completed(out: Path) -> bool:
    """Return whether the run in ``out`` came to its end."""
    summary = out / "summary.json"
    return summary.exists() and json.loads(summary.read_text())["status"] == "completed"


def planned_bytes(model: str, tile: int, batch: int, strategy: Strategy) -> int:
    """Return the planned bytes of the fullest rank, with the stages that ``app.train`` cuts."""
    machine = this_machine(strategy.ranks, timed=False)
    stages = Planner(Workload(model, tile, 2).task(batch, machine.estimate), machine.cluster).stages
    graph, _ = stages.of(strategy)
    partition = strategy.partition(graph)
    return max(stages.rank_bytes(strategy, partition, rank).total for rank in range(strategy.depth))
