"""Small synthetic slides, made once, and ``app.train`` in this process or as a user starts it."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from app import synth
from tests.helpers.at_once import at_once, in_processes
from tests.helpers.forked import launched_here
from tests.helpers.in_process import call
from tests.helpers.indexed_once import indexed_once, kept_indexes
from tests.helpers.slurm import Slurm, missing_programs, running_slurm
from tests.helpers.traced_once import traced_once

__all__ = ["at_once", "in_processes", "indexed_once", "kept_indexes", "traced_once"]

ROOT = Path(__file__).parents[2]
QUICK = ("--model", "tests.helpers.tiny_models:classifier", "--tile", "256", "--batch", "4", "--microbatches", "2")
QUICK += ("--validation-tiles=3", "--validate-every=1000", "--twin-steps=0")
QUICK += ("--lr", "0.01")


@pytest.fixture(scope="session")
def classify_slides(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six slides of 1536 px with labels, two per patient."""
    folder = tmp_path_factory.mktemp("classify")
    assert synth.main([str(folder), "--slides", "6", "--size", "1536", "--task", "classify"]) == 0
    return folder


@pytest.fixture(scope="session")
def segment_slides(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four slides of 1536 px with masks of their glands."""
    folder = tmp_path_factory.mktemp("segment")
    assert synth.main([str(folder), "--slides", "4", "--size", "1536", "--task", "segment"]) == 0
    return folder


@pytest.fixture(scope="session")
def slurm() -> Iterator[Slurm]:
    """A Slurm of two nodes, both on this machine."""
    if missing := missing_programs():
        pytest.skip(f"no Slurm here: {', '.join(missing)} not found; tools/system_packages.sh installs it on Debian")
    with running_slurm() as started:
        yield started


Train = Callable[..., subprocess.CompletedProcess[str]]


def train_command(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "app.train", *map(str, arguments)]


def train_environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error::FutureWarning"}


@pytest.fixture(scope="session")
def train() -> Train:
    """``app.train`` in this process, on one rank."""
    return functools.partial(call, "app.train", env={"OMP_NUM_THREADS": "1"})


@pytest.fixture
def train_ranks(train: Train, tmp_path_factory: pytest.TempPathFactory) -> Train:
    """``app.train`` in this process; the ranks that it starts are forked from one that has loaded torch."""

    def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
        with launched_here(tmp_path_factory.mktemp("ranks")):
            return train(*arguments)

    return run


@pytest.fixture(scope="session")
def train_process() -> Train:
    """``python -m app.train`` in a process of its own; a hang is a failure."""

    def run(*arguments: str | Path, timeout_s: float = 150) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            train_command(*arguments),
            cwd=ROOT,
            env=train_environment(),
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )

    return run


def rank_process(launcher: subprocess.Popen[Any], rank: int) -> psutil.Process:
    """The process of a rank that ``--ranks`` has started."""
    children = psutil.Process(launcher.pid).children(recursive=True)
    return next(child for child in children if child.name() == f"rank {rank}")


def summary_of(run: Path) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads((run / "summary.json").read_text())
    return summary
