"""What holds a test to its lane: starts of processes, time, and the part of a grid that the quick lane runs."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.lanes import is_helper
from tests.helpers.pairs import covering
from tools.seeded_faults import files_of, read_faults

ROOT = Path(__file__).parents[1]

TESTS = """
import contextlib, multiprocessing, os, subprocess, sys, time
import pytest

def test_a_start():
    subprocess.run([sys.executable, "-c", ""])

def test_a_start_whose_failure_is_caught():
    with contextlib.suppress(BaseException):
        os.system("true")

@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_multiprocessing(method):
    multiprocessing.get_context(method).Process(target=time.time).start()

@pytest.fixture
def child():
    if not (child := os.fork()):
        os._exit(0)
    os.waitpid(child, 0)

def test_a_fixture(child):
    pass

def test_work(monkeypatch):
    end = time.process_time() + 0.6
    while time.process_time() < end:
        pass

def test_waiting():
    time.sleep(2.2)

@pytest.mark.process
def test_marked(child):
    subprocess.run([sys.executable, "-c", ""], check=True)

@pytest.mark.long
def test_marked_as_long():
    time.sleep(2.2)

def test_a_helper_and_little_time():
    subprocess.run(["git", "--version"], check=True)
    time.sleep(0.6)
"""


@pytest.mark.process
def test_an_unmarked_test_starts_nothing_and_is_quick(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(
        "from tests.helpers import lanes\nfrom tests.conftest import *\n"
        "lanes.LIMIT_S, lanes.is_calm = 0.5 / lanes.SLOWER, lambda: True\n"
    )
    (tmp_path / "test_all.py").write_text(TESTS)
    command = ["-m", "pytest", "-p", "no:cacheprovider", "-c", str(ROOT / "pyproject.toml"), "--rootdir", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, *command, str(tmp_path)],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "COLUMNS": "400"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert "3 passed" in done.stdout, done.stdout + done.stderr
    told = {
        line.split("::")[1].split(" - ")[0]: line.split(" - ")[1]
        for line in done.stdout.splitlines()
        if line.startswith(("FAILED", "ERROR"))
    }
    starts = {"test_a_start", "test_a_start_whose_failure_is_caught", "test_a_fixture"}
    starts |= {f"test_multiprocessing[{method}]" for method in ("fork", "spawn", "forkserver")}
    assert {name for name, message in told.items() if "starts a process" in message} == starts
    assert {name for name, message in told.items() if "of processor time" in message} == {"test_work", "test_waiting"}
    assert len(told) == len(starts) + 2


@pytest.mark.parametrize(
    ("command", "helper"),
    [
        (("git", "status"), True),
        (("/usr/bin/git", "status"), True),
        ((sys.executable, "-m", "pipelines.catalog.processes", "7"), True),
        ((sys.executable, "-m", "app.train"), False),
        ((sys.executable, "-c", "import torch"), False),
        (("bash", "git"), False),
        ((), False),
    ],
)
def test_helpers_are_known_by_their_first_words(command: tuple[str, ...], helper: bool) -> None:
    assert is_helper(command) == helper


def pairs(rows: list[tuple[int, ...]]) -> set[object]:
    return {pair for row in rows for pair in itertools.combinations(enumerate(row), 2)}


@given(sizes=st.lists(st.integers(1, 6), min_size=1, max_size=4), keep=st.randoms())
def test_a_part_of_a_grid_has_every_pair(sizes: list[int], keep: Callable[..., object]) -> None:
    rows = list(itertools.product(*map(range, sizes)))
    rows = keep.sample(rows, keep.randint(1, len(rows)))  # type: ignore[attr-defined]
    part = [rows[k] for k in covering(rows)]
    assert pairs(part) == pairs(rows)
    assert part == [row for row in rows if row in part]


def test_a_part_is_as_small_as_pairs_allow() -> None:
    assert len(covering(list(itertools.product(range(2), range(4), range(13))))) == 4 * 13
    assert len(covering(list(itertools.product(range(8), range(3))))) == 8 * 3


def test_seeded_faults_have_their_place() -> None:
    for fault in read_faults():
        assert (ROOT / fault.file).read_text().count(fault.old) == 1, fault
        assert files_of(fault.test), fault
