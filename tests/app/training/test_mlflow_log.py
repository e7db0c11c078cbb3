"""MLflow is told what TensorBoard is, resumed as one run, and never waited for."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from app.settings.run import DataSettings, RunConfig
from app.training import metrics_log
from app.training.metrics_log import MlflowLog
from tests.app.conftest import QUICK, Train

FAKE = Path(__file__).parents[2] / "helpers" / "fake_mlflow"


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a fake server, and its client where ``import mlflow`` finds it."""
    monkeypatch.syspath_prepend(FAKE)
    for name in ("mlflow", "mlflow.entities"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    folder = tmp_path / "server"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", str(folder))
    return folder


def calls(server: Path) -> list[list[Any]]:
    return [json.loads(line) for line in (server / "calls").read_text().splitlines()]


def scalars(server: Path) -> list[tuple[str, int, float]]:
    told = [metric for call, *rest in calls(server) if call == "log_batch" for metric in rest[1]]
    return [(name, step, value) for name, value, _, step in told]


def test_a_run_and_its_resumed_rest_are_one(server: Path, classify_slides: Path, train: Train, tmp_path: Path) -> None:
    server.mkdir()
    out = tmp_path / "run"
    arguments = ("--slides", classify_slides, *QUICK, "--out", out, "--mlflow=study")
    for more in (("--steps", "2"), ("--steps", "3", "--resume", "--extend")):
        done = train(*arguments, *more)
        assert done.returncode == 0, done.stderr
    told = calls(server)
    assert [call for call in told if call[0] in ("create_experiment", "create_run", "update_run")] == [
        ["create_experiment", "study"],
        ["create_run", "7", "run"],
        ["update_run", "run of run", "RUNNING"],
    ]
    with (out / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    losses = [(step, value) for name, step, value in scalars(server) if name == "train/loss"]
    assert losses == [(int(row["step"]), float(row["loss"])) for row in rows]
    assert {name for name, _, _ in scalars(server)} >= {"train/lr", "validation/loss", "validation/tile_auc"}
    params = dict(param for call, *rest in told if call == "log_batch" for param in rest[2])
    assert (params["tile"], params["mlflow"], params["steps"]) == ("256", "study", "2")
    assert [call[2] for call in told if call[0] == "set_terminated"] == ["FINISHED", "FINISHED"]
    sent = [call[2] for call in told if call[0] == "log_artifact"]
    assert sent.count("summary.json") == sent.count("report.html") == sent.count("metrics.csv") == 2


def test_a_server_that_comes_late_is_told_all(
    server: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(metrics_log, "RETRY_S", 0.05)
    monkeypatch.setattr(metrics_log, "SEND_EVERY_S", 0.05)
    log = MlflowLog(tmp_path, "study", {f"setting{k}": "x" * 600 for k in range(150)})
    for step in range(1500):
        log.scalars(step, {"train/loss": float(step), "train/none": None})
    while "MLflow cannot be told" not in caplog.text:
        pass
    server.mkdir()
    log.close("interrupted")
    assert [step for _, step, _ in scalars(server)] == list(range(1500))
    assert calls(server)[-1] == ["set_terminated", f"run of {tmp_path.name}", "KILLED"]
    assert caplog.text.count("MLflow") == 1


def test_a_server_that_is_not_there_ends_nothing(
    server: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(metrics_log, "MOST_WAITING", 3)
    log = MlflowLog(tmp_path, "study", {})
    for step in range(5):
        log.scalars(step, {"train/loss": 1.0})
    log.close("completed")
    assert caplog.text.count("MLflow cannot be told, and is tried again every 30 s: connection refused") == 1
    assert f"MLflow was not told 5 scalars and the last files; all are in {tmp_path}" in caplog.text


def test_without_mlflow_it_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    (fault,) = RunConfig(DataSettings(Path("slides")), mlflow="study").validate()
    assert fault.startswith("--mlflow=study needs the package mlflow or mlflow-skinny, which is not installed")


def test_every_scalar_is_sent_or_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scalars that come while a message is under way push others out of a full queue."""
    monkeypatch.setattr(metrics_log, "MOST_WAITING", 10)
    monkeypatch.setattr(metrics_log, "MOST_METRICS", 4)
    monkeypatch.setattr(MlflowLog, "_start", lambda self: None)
    monkeypatch.setitem(sys.modules, "mlflow.entities", SimpleNamespace(Metric=lambda *scalar: scalar, Param=None))
    told = MlflowLog(tmp_path, "study", {})
    sent: list[Any] = []

    class Client:
        def log_batch(self, run: str, metrics: list[Any]) -> None:
            told.scalars(len(sent) + 100, {"more": 1.0, "again": 2.0})
            sent.extend(metrics)

    given = 14
    for step in range(given):
        told.scalars(step, {"loss": 0.5})
    for _ in range(3):
        told._send(Client(), "run")
        given += 2
    assert len(sent) == len(set(sent)) == 12
    assert len(sent) + len(told._waiting) + told._dropped == given
