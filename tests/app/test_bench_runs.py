"""``app.bench``: whole small benchmarks, as a user starts them."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from app.benchmark import trial
from tests.app.conftest import ROOT, Train, train_environment
from tests.helpers.in_process import call

DELAYED = "delayed gradients, not the plain step"
TINY = ("--model", "tests.helpers.tiny_models:classifier", "--mpp", "0.5", "--tiles", "256", "--batch", "4")


@pytest.fixture
def bench(train_ranks: Train, monkeypatch: pytest.MonkeyPatch) -> Train:
    """``app.bench`` in this process, which trains in this process, too; ranks are forked."""

    def run(command: list[str], output: Path, timeout_s: float) -> int:
        done = train_ranks(*command[3:])
        output.write_text(done.stdout + done.stderr)
        return done.returncode

    def bench(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
        monkeypatch.setattr(trial, "_run", run)
        return call("app.bench", *arguments, env={"OMP_NUM_THREADS": "1"})

    return bench


@pytest.mark.process
def test_a_benchmark_as_a_user_starts_it(classify_slides: Path, bench: Train, tmp_path: Path) -> None:
    """First in processes of its own; then refused, and gone on with."""
    out = tmp_path / "bench"
    asked = [*TINY, "--slides", str(classify_slides), "--steps", "3", "--out", str(out), "--ranks", "2"]
    asked += ["--microbatches", "4", "--repeats", "1", "--twin-steps=1"]
    first = subprocess.run(
        [sys.executable, "-m", "app.bench", *asked, "--strategies", "ddp", "mast"],
        cwd=ROOT,
        env=train_environment(),
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert first.returncode == 0, first.stdout + first.stderr
    assert "mast computes 2 microbatches" in first.stdout
    refused = bench(*asked, "--strategies", "ddp")
    assert refused.returncode == 2
    assert "--resume" in refused.stderr
    second = bench(*asked, "--strategies", "ddp", "mast", "master", "pipedream", "--resume")
    assert second.returncode == 0, second.stdout + second.stderr
    assert second.stdout.count("images/s (") == 2  # those that were added
    ddp, mast, master, pipedream = json.loads((out / "bench.json").read_text())["rows"]
    assert [row["strategy"] for row in (ddp, mast, master, pipedream)] == ["ddp", "mast", "master", "pipedream"]
    assert [row["status"] for row in (ddp, mast, master, pipedream)] == ["ok", "cannot", "ok", "ok"]
    assert master["loss_matches"] is True
    assert len(master["peak_memory_bytes"]) == len(master["device_bytes"]) == len(master["bytes_sent"]) == 2
    assert 0 < master["bubble_predicted"] < 1
    assert (out / master["schedule_svg"]).exists()
    assert ddp["baseline"] is None
    assert master["times_baseline"] == pytest.approx(master["images_per_second"] / ddp["images_per_second"])
    assert "x ddp on 2 ranks" in second.stdout
    assert not list(out.glob("trials/*/*/checkpoints"))
    assert pipedream["loss_matches"] is None
    assert pipedream["claim"].endswith(f"x ddp on 2 ranks, measured once; {DELAYED}")
    assert DELAYED not in ddp["claim"]
    (summary,) = out.glob("trials/*pipedream*/*/summary.json")
    assert json.loads(summary.read_text())["gradients"] == DELAYED
    assert DELAYED in " ".join((summary.parent / "run.log").read_text().split())
    assert DELAYED in (out / "report.html").read_text()


@pytest.mark.process
def test_groups_and_teams_are_measured(classify_slides: Path, bench: Train, tmp_path: Path) -> None:
    out = tmp_path / "groups"
    asked = [*TINY, "--slides", str(classify_slides), "--steps", "3", "--repeats", "1", "--out", str(out)]
    asked += ["--ranks", "4", "--stages", "2", "--microbatches", "4", "--twin-steps=0"]
    done = bench(*asked, "--strategies", "ddp", "gpipe", "1f1b@2x1")
    assert done.returncode == 0, done.stdout + done.stderr
    ddp, gpipe, team = json.loads((out / "bench.json").read_text())["rows"]
    assert (gpipe["strategy"], gpipe["status"], gpipe["ranks"], gpipe["stages"]) == ("gpipe 2 x 2", "ok", 4, 2)
    assert (ddp["status"], ddp["stages"], gpipe["loss_matches"]) == ("ok", None, True)
    assert gpipe["claim"].endswith("x ddp on 4 ranks, measured once")
    assert (team["strategy"], team["grid"], team["status"], team["loss_matches"]) == ("1f1b of 2x1", "2x1", "ok", True)
    for shown in (done.stdout, (out / "report.html").read_text()):
        assert "1f1b of 2x1" in shown


@pytest.mark.process
def test_a_benchmark_that_is_asked_to_end_leaves_nothing_running(classify_slides: Path, tmp_path: Path) -> None:
    out = tmp_path / "ended"
    asked = [*TINY, "--slides", str(classify_slides), "--steps", "100000"]
    asked += ["--ranks", "2", "--strategies", "ddp", "--out", str(out)]
    bench = subprocess.Popen(
        [sys.executable, "-m", "app.bench", *asked], cwd=ROOT, env=train_environment(), stdout=subprocess.DEVNULL
    )
    metrics = out / "trials" / "256px_2x_ddp" / "1" / "metrics.csv"
    until = time.monotonic() + 120
    while not metrics.exists() and time.monotonic() < until:
        time.sleep(0.2)
    ranks = psutil.Process(bench.pid).children(recursive=True)
    assert len(ranks) >= 3  # the launcher and two ranks
    bench.terminate()
    assert bench.wait(30) == 128 + signal.SIGTERM
    _, left = psutil.wait_procs(ranks, timeout=10)
    assert not left
