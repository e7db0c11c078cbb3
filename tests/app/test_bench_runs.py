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

from tests.app.conftest import ROOT, train_environment

TINY = ("--model", "tests.helpers.tiny_models:classifier", "--mpp", "0.5", "--developer", "twin-steps=1")


@pytest.mark.process
def test_a_benchmark_as_a_user_starts_it(classify_slides: Path, tmp_path: Path) -> None:
    out = tmp_path / "bench"
    asked = [
        *TINY,
        "--slides",
        str(classify_slides),
        "--tiles",
        "256",
        "--batch",
        "4",
        "--steps",
        "3",
        "--out",
        str(out),
    ]
    asked += ["--ranks", "2", "--repeats", "1"]
    first = bench_run(*asked, "--strategies", "ddp", "mast")
    assert first.returncode == 0, first.stdout + first.stderr
    assert "mast computes 2 microbatches" in first.stdout
    refused = bench_run(*asked, "--strategies", "ddp")
    assert refused.returncode == 2
    assert "--resume" in refused.stderr
    second = bench_run(*asked, "--strategies", "ddp", "mast", "master", "--resume")
    assert second.returncode == 0, second.stdout + second.stderr
    assert second.stdout.count("images/s (") == 1  # the one that was added
    found = json.loads((out / "bench.json").read_text())
    assert [(row["strategy"], row["status"]) for row in found["rows"]] == [
        ("ddp", "ok"),
        ("mast", "cannot"),
        ("master", "ok"),
    ]
    ddp, _, master = found["rows"]
    assert master["loss_matches"] is True
    assert len(master["peak_memory_bytes"]) == len(master["device_bytes"]) == len(master["bytes_sent"]) == 2
    assert 0 < master["bubble_predicted"] < 1
    assert (out / master["schedule_svg"]).exists()
    assert ddp["baseline"] is None
    assert master["times_baseline"] == pytest.approx(master["images_per_second"] / ddp["images_per_second"])
    assert "x ddp on 2 ranks" in second.stdout
    assert (out / "report.html").exists()
    assert not list(out.glob("trials/*/*/checkpoints"))


@pytest.mark.process
def test_groups_and_teams_are_measured_as_a_user_starts_them(classify_slides: Path, tmp_path: Path) -> None:
    out = tmp_path / "groups"
    asked = [*TINY[:4], "--slides", str(classify_slides), "--tiles", "256", "--batch", "4", "--steps", "3"]
    asked += ["--ranks", "4", "--stages", "2", "--microbatches", "4", "--repeats", "1", "--developer", "twin-steps=0"]
    done = bench_run(*asked, "--strategies", "ddp", "gpipe", "1f1b@2x1", "--out", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    ddp, gpipe, team = json.loads((out / "bench.json").read_text())["rows"]
    assert (gpipe["strategy"], gpipe["status"], gpipe["ranks"], gpipe["stages"]) == ("gpipe 2 x 2", "ok", 4, 2)
    assert (ddp["status"], ddp["stages"], gpipe["loss_matches"]) == ("ok", None, True)
    assert gpipe["claim"].endswith("x ddp on 4 ranks, measured once")
    assert (team["strategy"], team["grid"], team["status"], team["loss_matches"]) == ("1f1b of 2x1", "2x1", "ok", True)
    for shown in (done.stdout, (out / "report.html").read_text()):
        assert "1f1b of 2x1" in shown


@pytest.mark.process
def test_delayed_gradients_are_marked_in_table_and_reports(classify_slides: Path, tmp_path: Path) -> None:
    out, words = tmp_path / "delayed", "delayed gradients, not the plain step"
    asked = [*TINY[:4], "--slides", str(classify_slides), "--tiles", "256", "--batch", "4", "--steps", "3"]
    asked += ["--ranks", "2", "--microbatches", "4", "--repeats", "1", "--developer", "twin-steps=0"]
    done = bench_run(*asked, "--strategies", "ddp", "pipedream", "--out", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    ddp, pipedream = json.loads((out / "bench.json").read_text())["rows"]
    assert (pipedream["status"], pipedream["loss_matches"]) == ("ok", None)
    assert pipedream["claim"].endswith(f"x ddp on 2 ranks, measured once; {words}")
    assert words not in ddp["claim"]
    (summary,) = out.glob("trials/*pipedream*/*/summary.json")
    assert json.loads(summary.read_text())["gradients"] == words
    assert words in " ".join((summary.parent / "run.log").read_text().split())
    assert words in (out / "report.html").read_text()


@pytest.mark.process
def test_a_benchmark_that_is_asked_to_end_leaves_nothing_running(classify_slides: Path, tmp_path: Path) -> None:
    out = tmp_path / "ended"
    asked = [*TINY, "--slides", str(classify_slides), "--tiles", "256", "--batch", "4", "--steps", "100000"]
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


def bench_run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "app.bench", *arguments],
        cwd=ROOT,
        env=train_environment(),
        capture_output=True,
        text=True,
        timeout=250,
    )
