"""The GPU benchmark on a CPU: parts give rows, faults are rows, files hold what there was."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import results
from benchmarks.gpu import largest, naive, offload_time, precision, report, run, smoke, smoke_engines, study
from benchmarks.gpu.setting import Setting, attempt
from tests.helpers.benchmark_run import run_on_forked_ranks
from tests.helpers.forked import launched_here
from tests.helpers.in_process import call
from tests.helpers.sim_gpu import simulated
from tests.helpers.sim_gpu.ranks import run_ranks, within

pytestmark = pytest.mark.bench

ROOT = Path(__file__).parents[1]
CPU = torch.device("cpu")


def tiny(seconds: float = 0.0) -> Setting:
    return Setting(CPU, time.perf_counter() + seconds)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def test_command_writes_what_it_measured(tmp_path: Path) -> None:
    command = ["benchmarks/gpu/run.sh", "--quick", "--seconds", "2", "--out", str(tmp_path), "--parts", "copies"]
    done = subprocess.run(
        ["bash", *command, "precision"],
        cwd=ROOT,
        env={**os.environ, "PYTHON": sys.executable, "PIP_NO_INDEX": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / report.JSON_NAME).read_text())
    assert not result["gpu"]
    assert all(part["rows"] and "fault" not in part for part in result["parts"].values()), result
    assert "No GPU was there" in (tmp_path / report.TEXT_NAME).read_text()


def test_smoke_runs_every_row(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """On a CPU all rows but those under the CUDA sanitizer; ranks are forked, and commands run in this process."""

    def run(module: str, *words: str | Path, env: Mapping[str, str], limit_s: float) -> Any:
        with launched_here(Path(tempfile.mkdtemp(dir=tmp_path))):
            return call(module, *words, env={"OMP_NUM_THREADS": "1", **env})

    monkeypatch.setattr(smoke, "run_on_ranks", run_on_forked_ranks)
    monkeypatch.setattr(smoke, "run_process", run)
    rows = list(smoke.rows(tiny(600.0)))
    assert [row["name"] for row in rows if not row["passed"]] == []
    assert len(rows) == len(smoke.ALONE) + len(smoke.TOGETHER) + len(smoke.COMMANDS)
    assert all(len(smoke.line(row)) == len(smoke.HEADER) for row in rows)
    assert all(row["error"] <= row["allowed"] for row in rows if "syncs" not in row)


@pytest.mark.parametrize(("ranks", "table"), [(1, smoke.ALONE), (2, smoke.TOGETHER)])
def test_smoke_rows_on_simulated_gpus(ranks: int, table: Sequence[tuple[str, str, str, str]], tmp_path: Path) -> None:
    """What they do on CUDA alone. Simulated GPUs have no autocast."""
    cases = [smoke._case(tiny(), ranks, *case) for case in table if case[1] != "bf16"]
    with simulated(ranks, late=0) as gpus:
        argument = {"device": "cuda", "rows": str(tmp_path / "rows"), "cases": cases}
        run_ranks(gpus, ranks, lambda communicator: smoke_engines.run_all(communicator, argument))
        assert not gpus.found
    rows = [json.loads(line) for line in (tmp_path / "rows").read_text().splitlines()]
    assert [row["name"] for row in rows if row["passed"]] == [case["name"] for case in cases]
    assert all(row["syncs"] < 2 for row in rows if row["run"] == "syncs")


def test_smoke_goes_on_behind_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a pretended GPU: rows before and behind a failure are there, and all run once more under the sanitizer."""
    started: list[tuple[int, dict[str, str], list[str]]] = []

    def run_on_ranks(world: int, target: str, argument: Any, *, env: dict[str, str], **_: Any) -> None:
        cases = argument["cases"]
        started.append((world, env, [case["name"] for case in cases]))
        passed = [{**case, "passed": True, "error": 0.0, "allowed": 1.0, "seconds": 1.0} for case in cases]
        fine = next((k for k, case in enumerate(cases) if case["name"] in ("stream", "spatial")), len(cases))
        Path(argument["rows"]).write_text("".join(json.dumps(row) + "\n" for row in passed[:fine]))
        if fine < len(cases):
            said = "ValueError: save_mean" if world == 1 else "ModuleNotFoundError: No module named 'tyro'"
            raise RuntimeError(f"t on {world} ranks ended with exit code 1: {said}")

    def run_process(module: str, *_: object, env: Mapping[str, str], limit_s: float) -> Any:
        raise subprocess.TimeoutExpired(module, limit_s)

    monkeypatch.setattr(smoke, "run_on_ranks", run_on_ranks)
    monkeypatch.setattr(smoke, "run_process", run_process)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    rows = list(smoke.rows(Setting(torch.device("cuda:0"), time.perf_counter() + 60)))
    launches = [(1, False), (2, False), (1, True), (2, True)]
    assert [(world, bool(env)) for world, env, _ in started] == [launch for launch in launches for _ in range(2)]
    assert all(env in ({}, {"TORCH_CUDA_SANITIZER": "1"}) for _, env, _ in started)
    states = {(row["name"], row["sanitized"]): row["passed"] for row in rows}
    assert states["stream", False] is states["stream", True] is False
    assert states["recompute", False] is states["recompute", True] is True
    assert states["spatial", False] is None, "a package was missing"
    assert states["app.train --resume", False] is None, "there was no time"
    assert states["app.train --resume, a GPU less", False] is None, "there was one GPU"
    assert not any(name.startswith("app.") and sanitized for name, sanitized in states)
    shown = {smoke.line(row) for row in rows}
    assert ("stream", "no", "1", "-", "-", "NO", "-", "exit code 1: ValueError: save_mean") in shown
    assert not any(row["sanitized"] and row["run"] == "syncs" for row in rows if "run" in row)


def test_exit_code_says_whether_rows_passed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row: dict[str, Any] = {"sanitized": False, "name": "stream", "ranks": 1, "over": "-"}
    result = {"device": "a GPU", "driver": "1", "gpu": True, "link": "", "command": "c", "environment": "e", "date": ""}
    for passed, code, said in ((True, 0, "none failed"), (None, 0, "1 were not run"), (False, 1, "1 FAILED: stream")):
        result["parts"] = {"smoke": {"rows": [{**row, "passed": passed, "failure": "why"}]}}
        (tmp_path / "gpu.json").write_text(json.dumps(result))
        monkeypatch.setattr(sys, "argv", ["run", "--from", str(tmp_path / "gpu.json"), "--parts", "smoke"])
        assert run.main() == code
        assert said in capsys.readouterr().out


def test_offload_keeps_less_and_moves_what_it_does_not_keep() -> None:
    rows = [row for row in offload_time.rows(tiny()) if row["model"] == "resnet18"]
    by_way = {row["way"]: row for row in rows}
    assert not any("fault" in row for row in rows), rows
    plain_bytes = by_way["offload"]["plain_kept_bytes"]
    assert by_way["offload"]["kept_bytes"] < plain_bytes / 2
    # What several layers keep leaves once, and may come back for each of them.
    assert by_way["offload"]["back_bytes"] >= by_way["offload"]["out_bytes"] == plain_bytes
    assert by_way["recompute block"]["out_bytes"] == 0
    assert by_way["recompute block"]["kept_bytes"] < plain_bytes / 2
    assert all(len(offload_time.line(row)) == len(offload_time.HEADER) for row in rows)


def test_largest_tile_that_trained_is_the_predicted_one() -> None:
    rows = list(largest.rows(tiny()))
    assert [row["trained_px"] for row in rows] == [row["predicted_px"] for row in rows]
    trained = {row["way"]: row["trained_px"] for row in rows}
    assert trained["plain"] < trained["offload"]
    assert all(len(largest.line(row)) == len(largest.HEADER) for row in rows)


def test_precision_has_a_row_for_each_type() -> None:
    rows = list(precision.rows(tiny()))
    assert [(row["offload"], row["type"]) for row in rows] == [
        ("none", "float32"),
        ("none", "tf32"),
        ("none", "bfloat16"),
        ("overlap", "float32"),
        ("overlap", "tf32"),
        ("overlap", "bfloat16"),
    ]
    assert all(len(precision.line(row)) == len(precision.HEADER) for row in rows)


def test_every_approach_of_the_study_trains_alike() -> None:
    rows = list(study.rows(tiny()))
    assert [row["approach"] for row in rows] == [*study.SCRIPTS, "overlap"]
    assert all(row["passed"] and row["losses"] == rows[0]["losses"] for row in rows)
    assert len(set(rows[0]["losses"])) == study.LEAST + study.WAITING
    state = [*study.build("squeezenet1_1").state_dict().values()]
    assert {row["CtoG_bytes"] for row in rows[1:-1]} == {sum(tensor.nbytes for tensor in state)}
    # The forward pass brings parameters, the backward pass weights alone; gradients go back.
    assert rows[1]["GtoC_bytes"] == rows[-1]["GtoC_bytes"] < rows[-1]["CtoG_bytes"] < 2 * rows[1]["CtoG_bytes"]
    assert rows[0]["CtoG"] is None
    assert all(row["CtoG"]["min"] <= row["CtoG"]["median"] <= row["CtoG"]["max"] for row in rows[1:])
    assert all(len(study.line(row)) == len(study.HEADER) for row in rows)


def test_the_study_on_a_simulated_gpu() -> None:
    """Copies are asynchronous and as late as their order allows; the parameters are on the device in a step only."""
    with simulated(1, late=0) as gpus, within(gpus, 1):
        setting = Setting(torch.device("cuda:0"), time.perf_counter())
        rows = study.measure(setting, "squeezenet1_1", 2, 32, 2)
        assert not gpus.found
    assert [row["name"] for row in rows if not row["passed"]] == []
    assert all(row["CtoG_bytes"] == row["GtoC_bytes"] > 0 for row in rows[1:-1])


@pytest.mark.parametrize("model", study.PUBLISHED)
def test_models_of_the_study_have_the_published_parameters(model: str) -> None:
    with torch.device("meta"):
        study.build(model)


def test_an_approach_that_trains_otherwise_is_missed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Updates of the device's copy are lost: what was on the host comes back."""

    def to_device(self: naive.TensorByTensor) -> None:
        self.before = [tensor.data for tensor in self._state]
        for tensor in self._state:
            tensor.data = tensor.data.clone()

    def to_host(self: naive.TensorByTensor) -> None:
        for tensor, host in zip(self._state, self.before, strict=True):
            tensor.data = host

    monkeypatch.setattr(naive.TensorByTensor, "to_device", to_device)
    monkeypatch.setattr(naive.TensorByTensor, "to_host", to_host)
    monkeypatch.setattr(study, "keep_freed_memory", lambda: True)
    monkeypatch.setattr(results, "OUT", tmp_path)
    monkeypatch.setattr(sys, "argv", ["study", "--models", "squeezenet1_1", "--iterations", "2", "--px", "32"])
    with pytest.raises(SystemExit) as stop:
        study.main()
    assert stop.value.code == 1
    said = capsys.readouterr().out
    assert "squeezenet1_1 pinned: other losses" in said
    assert "squeezenet1_1 flattened: other losses" not in said
    assert "4. Offload multiplies training time" in said


def test_a_fault_is_a_row() -> None:
    def run() -> dict[str, object]:
        raise torch.OutOfMemoryError("so much was tried")

    row = attempt({"model": "vgg19"}, run)
    assert row == {"model": "vgg19", "fault": "out of memory"}
    part = {"rows": [row], "fault": "stopped after 3 s"}
    result = {"device": "cpu", "driver": "none", "gpu": False, "link": "", "command": "c", "environment": "e"}
    result["parts"] = {"study": part}
    text = report.text_of(result, {"study": study})
    assert "- model vgg19: out of memory" in text
    assert "The part ended early: stopped after 3 s." in text
