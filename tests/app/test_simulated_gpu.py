"""app.train, app.predict and app.verify on simulated GPUs: the numbers of the CPU, and nothing unordered.

Kernels and copies run as late as their order allows, and memory without a value holds NaN, so what is not waited for
changes a number. The host waits a bounded number of times for each microbatch.
"""

from __future__ import annotations

import csv
import shutil
from pathlib import Path

import pytest

from tests.app.conftest import QUICK, Train
from tests.helpers.in_process import call
from tests.helpers.lanes import long_where
from tests.helpers.sim_gpu import Gpus, simulated

STEPS, MICROBATCHES = 3, 2
COMMAND = (*QUICK, "--tile", "128", "--steps", str(STEPS))
ON_GPU = ("--device", "cuda", "--precision", "fp32")
WAYS = {
    "plain": (),
    "made ahead": ("--device-prefetch=2",),
    "stream": ("--stream", "64"),
    "recompute": ("--recompute", "block"),
    "offload": ("--offload", "overlap", "--offload-ahead=16KiB"),
    "optimizer on the host": ("--offload-state=optimizer",),
    "parameters on the host": ("--offload-state=parameters",),
    "checkpoints": ("--checkpoint-every", "1"),
}


def losses(run: Path) -> list[float]:
    with open(run / "metrics.csv") as file:
        return [float(row["loss"]) for row in csv.DictReader(file)]


def waits(gpus: Gpus, *places: str) -> int:
    """How often the host waited in these modules."""
    return sum(count for where, count in gpus.process.hazards.syncs.items() if any(place in where for place in places))


@pytest.fixture(scope="module")
def on_cpu(classify_slides: Path, train: Train, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on the CPU."""
    run = tmp_path_factory.mktemp("cpu") / "run"
    done = train("--slides", classify_slides, "--out", run, *COMMAND, "--device", "cpu")
    assert done.returncode == 0, done.stderr
    return run


@pytest.mark.parametrize("way", long_where(WAYS, "recompute", "optimizer on the host"))
def test_training(way: str, classify_slides: Path, on_cpu: Path, train: Train, tmp_path: Path) -> None:
    with simulated(1, late=0) as gpus:
        done = train("--slides", classify_slides, "--out", tmp_path / "run", *COMMAND, *ON_GPU, *WAYS[way])
        assert done.returncode == 0, done.stderr
        assert not gpus.found
        assert gpus.process.launches > 100
    assert losses(tmp_path / "run") == pytest.approx(losses(on_cpu), rel=1e-5)


def test_resume_with_fewer_devices(classify_slides: Path, on_cpu: Path, train: Train, tmp_path: Path) -> None:
    command = ("--slides", classify_slides, "--out", tmp_path / "run", *COMMAND, *ON_GPU, "--checkpoint-every", "1")
    with simulated(4):
        first = train(*command)
        assert first.returncode == 0, first.stderr
    with simulated(2) as gpus:
        done = train(*command, "--steps", str(STEPS + 1), "--resume", "--extend")
        assert done.returncode == 0, done.stderr
        assert not gpus.found
    assert len(losses(tmp_path / "run")) == STEPS + 1


@pytest.mark.parametrize("way", [pytest.param((), marks=pytest.mark.long), ("--stream", "64")], ids=["whole", "stream"])
def test_prediction(way: tuple[str, ...], classify_slides: Path, on_cpu: Path, tmp_path: Path) -> None:
    slide = sorted(classify_slides.glob("*.tif*"))[0]
    slides = tmp_path / "slides"
    slides.mkdir()
    shutil.copy(slide, slides)
    command = ("--checkpoint", on_cpu / "checkpoints/last.pt", "--model", "tests.helpers.tiny_models:classifier")
    command = ("app.predict", *command, "--slides", slides, *way, "--out")
    assert call(*command, tmp_path / "cpu", "--device", "cpu").returncode == 0
    with simulated(1, late=0) as gpus:
        done = call(*command, tmp_path / "gpu", "--device", "cuda")
        assert done.returncode == 0, done.stderr
        assert not gpus.found
    on_each = []
    for device in ("cpu", "gpu"):
        with open(tmp_path / device / "slides.csv") as file:
            on_each += [[float(row["score_crowded"]) for row in csv.DictReader(file)]]
    assert on_each[0] == pytest.approx(on_each[1], rel=1e-6)


def test_verify() -> None:
    with simulated(1, late=0) as gpus:
        done = call("app.verify", "--model", "tests.helpers.tiny_models:classifier", "--tile", "64", "--device", "cuda")
        assert done.returncode == 0, done.stderr
        assert "passed" in done.stdout
        assert not gpus.found
