"""Small synthetic slides, made once, and ``app.train`` in this process or as a user starts it."""

import contextlib
import csv
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest
import torch

from app import synth
from app.launch.watchdog import Interrupt
from tests.helpers.at_once import at_once, in_processes
from tests.helpers.forked import launched_here
from tests.helpers.hand_made_checkpoint import CLASSIFIER, SEGMENTER
from tests.helpers.in_process import call
from tests.helpers.indexed_once import indexed_once, kept_indexes
from tests.helpers.slurm import missing_programs, running_slurm
from tests.helpers.traced_once import traced_once

__all__ = ["CLASSIFIER", "SEGMENTER", "at_once", "in_processes", "indexed_once", "kept_indexes", "traced_once"]

ROOT = Path(__file__).parents[2]
TORCHRUN = str(Path(sys.executable).with_name("torchrun"))
QUICK = ("--model", CLASSIFIER, "--tile", "256", "--batch", "4", "--microbatches", "2", "--lr", "0.01")
QUICK += ("--validation-tiles=3", "--validate-every=1000", "--twin-steps=0")


@pytest.fixture(scope="session")
def classify_slides(tmp_path_factory):
    """Six slides of 1536 px with labels, two per patient."""
    folder = tmp_path_factory.mktemp("classify")
    assert synth.main([str(folder), "--slides", "6", "--size", "1536", "--task", "classify"]) == 0
    return folder


@pytest.fixture(scope="session")
def segment_slides(tmp_path_factory):
    """Four slides of 1536 px with masks of their glands."""
    folder = tmp_path_factory.mktemp("segment")
    assert synth.main([str(folder), "--slides", "4", "--size", "1536", "--task", "segment"]) == 0
    return folder


@pytest.fixture(scope="session")
def slurm():
    """A Slurm of two nodes, both on this machine."""
    if missing := missing_programs():
        pytest.skip(f"no Slurm here: {', '.join(missing)} not found; tools/system_packages.sh installs it on Debian")
    with running_slurm() as started:
        yield started


BEGUN = []


def train_command(*arguments):
    return [sys.executable, "-m", "app.train", *map(str, arguments)]


def train_environment():
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error::FutureWarning"}


def begin(*command, new_session=False, **env):
    """Start a command whose output and errors come from one pipe."""
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    env = {**train_environment(), **env}
    BEGUN.append(subprocess.Popen(command, cwd=ROOT, env=env, start_new_session=new_session, **streams))
    return BEGUN[-1]


@pytest.fixture(autouse=True)
def nothing_goes_on():
    """End what a failed test has begun."""
    yield
    while BEGUN:
        process = BEGUN.pop()
        if not process.stdout.closed:
            process.kill()
            process.communicate()


INDEXED = {}


def give_index(slides, out):
    """Put the index that ``QUICK`` asks for into the folder of a run: made once, in this process."""
    if slides not in INDEXED:
        folder = Path(tempfile.mkdtemp())
        call("app.index", "--slides", slides, "--out", folder, "--tile", "256", code=0)
        INDEXED[slides] = folder / "tiles.parquet"
    out.mkdir()
    shutil.copy(INDEXED[slides], out)


def begin_train(*arguments, **env):
    """Start ``app.train`` with an index of its slides, and return once it has written its first checkpoint."""
    slides, out = (arguments[arguments.index(name) + 1] for name in ("--slides", "--out"))
    give_index(slides, out)
    process = begin(*train_command(*arguments), **env)
    checkpoint, deadline = out / "checkpoints" / "last.pt", time.monotonic() + 90
    while not checkpoint.exists():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, f"{checkpoint} did not appear"
        time.sleep(0.01)
    return process


@pytest.fixture(scope="session")
def train():
    """``app.train`` in this process, on one rank; ``code``: the exit code that it must have."""

    def run(*arguments, code=0):
        return call("app.train", *arguments, env={"OMP_NUM_THREADS": "1"}, code=code)

    return run


@pytest.fixture
def train_ranks(train, tmp_path_factory):
    """``app.train`` in this process; the ranks that it starts are forked from one that has loaded torch."""

    def run(*arguments, code=0):
        with launched_here(tmp_path_factory.mktemp("ranks")):
            return train(*arguments, code=code)

    return run


def rank_process(launcher, rank):
    """The process of a rank that ``--ranks`` has started."""
    children = psutil.Process(launcher.pid).children(recursive=True)
    return next(child for child in children if child.name() == f"rank {rank}")


@contextlib.contextmanager
def interrupted(steps):
    """A run is asked to end after ``steps`` steps."""
    asked = iter([*[False] * (steps - 1), True])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Interrupt, "requested", property(lambda _: next(asked), lambda _, value: None), raising=False)
        yield


def summary_of(run):
    return json.loads((run / "summary.json").read_text())


def rows_of(table):
    with table.open(newline="") as file:
        return list(csv.DictReader(file))


def losses_of(run, column="loss"):
    return [float(row[column]) for row in rows_of(run / "metrics.csv")]


def checkpoint_of(run):
    return torch.load(run / "checkpoints" / "last.pt", weights_only=True)


def same_weights(first, second):
    """Say whether two runs end with the same weights to the last bit."""
    ours, theirs = (checkpoint_of(run)["model"] for run in (first, second))
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
