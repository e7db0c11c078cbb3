"""As much of MLflow's client as is used, over a file: each call is a line of JSON in ``$MLFLOW_TRACKING_URI/calls``.

A folder that is not there is a server that cannot be reached.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any


class MlflowClient:
    def __init__(self) -> None:
        self._folder = Path(os.environ["MLFLOW_TRACKING_URI"])

    def _told(self, call: str, *arguments: Any) -> None:
        if not self._folder.is_dir():
            raise ConnectionError("connection refused")
        with (self._folder / "calls").open("a") as file:
            file.write(json.dumps([call, *arguments]) + "\n")

    def get_experiment_by_name(self, name: str) -> SimpleNamespace | None:
        self._told("get_experiment_by_name", name)
        known = (self._folder / "experiment").exists()
        return SimpleNamespace(experiment_id="7") if known else None

    def create_experiment(self, name: str) -> str:
        self._told("create_experiment", name)
        (self._folder / "experiment").touch()
        return "7"

    def create_run(self, experiment_id: str, run_name: str) -> SimpleNamespace:
        self._told("create_run", experiment_id, run_name)
        return SimpleNamespace(info=SimpleNamespace(run_id=f"run of {run_name}"))

    def update_run(self, run_id: str, status: str) -> None:
        self._told("update_run", run_id, status)

    def log_batch(self, run_id: str, metrics: Any = (), params: Any = ()) -> None:
        assert len(metrics) <= 1000
        assert len(params) <= 100
        self._told("log_batch", run_id, [list(m) for m in metrics], [list(p) for p in params])

    def log_artifact(self, run_id: str, path: str) -> None:
        self._told("log_artifact", run_id, Path(path).name, Path(path).stat().st_size)

    def set_terminated(self, run_id: str, status: str) -> None:
        self._told("set_terminated", run_id, status)
