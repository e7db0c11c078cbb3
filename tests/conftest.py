"""Two lanes, and what holds tests to theirs; property tests that draw the same examples in every run.

What lands is what passed, on any machine. To look for new examples: `pytest --hypothesis-profile=search`. A failure it
finds becomes an `@example` of its test.
"""

from __future__ import annotations

import errno
import fcntl
import gc
import itertools
import os
from collections.abc import Generator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.helpers.lanes import NEEDS, PATIENCE, SLOWER, Watch, marks_of
from tests.helpers.pairs import covering

# No deadline: a shared machine is at times ten times slower, and a time limit per test catches what hangs.
settings.register_profile("quick", derandomize=True, deadline=None, max_examples=25)
settings.register_profile("same", derandomize=True, deadline=None, max_examples=50)
settings.register_profile("search", max_examples=1000, deadline=None)

LONGEST = ("readme", "slurm", "bench", "process", "browser", "long")
"""Marks, those of the longest tests first."""

WATCH = pytest.StashKey[Watch]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="50 examples of each property, not 25")
    parser.addoption("--grids", action="store_true", help="whole grids of parameters, not every pair of their values")


def pytest_configure(config: pytest.Config) -> None:
    gc.disable()  # what is loaded while tests are collected stays: no search for garbage would find any
    for name, why in NEEDS.items():
        config.addinivalue_line("markers", f"{name}: {why}; not in `make test`")
    config.addinivalue_line("markers", "pairs: a part of its grid is run, in which every pair of values occurs")
    full = config.getoption("--full")
    if not config.getoption("--hypothesis-profile", None):
        settings.load_profile("same" if full else "quick")
    slow = full or "CI" in os.environ or "MEGATILE_BUSY" in os.environ
    config.stash[WATCH] = Watch(PATIENCE if slow else SLOWER)
    config.stash[WATCH].install()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--grids"):
        _thin(config, items)
    if hasattr(config, "workerinput"):
        _deal(items)


def pytest_collection_finish() -> None:
    _freeze()
    gc.enable()


def _freeze() -> None:
    """Free garbage, and keep what is left out of later collections: libraries and caches, which live to the end."""
    gc.collect()
    gc.freeze()


def _thin(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Take the grids of tests marked ``pairs`` down to a part in which every pair of values occurs."""
    grids: dict[tuple[Path, str], list[pytest.Function]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker("pairs"):
            grids.setdefault((item.path, item.originalname), []).append(item)
    left_out: set[pytest.Item] = set()
    for grid in grids.values():
        values = [tuple(map(id, item.callspec.params.values())) for item in grid]  # the same object in every item
        left_out |= set(grid) - {grid[k] for k in covering(values)}
    items[:] = [item for item in items if item not in left_out]
    config.hook.pytest_deselected(items=list(left_out))


def _deal(items: list[pytest.Item]) -> None:
    """Two workers begin with half of the tests each, and who is done takes from the end of the other's: both halves
    begin with marked tests, which are long, and end with quick ones."""
    files: dict[Path, list[pytest.Item]] = {}
    for item in items:
        if marks_of(item):
            files.setdefault(item.path, []).append(item)
    longest = sorted(files.values(), key=lambda group: min(LONGEST.index(mark) for mark in marks_of(group[0])))
    first, second = (list(itertools.chain(*longest[k::2])) for k in range(2))
    quick = [item for item in items if not marks_of(item)]
    begun = max(0, len(items) // 2 - len(first))
    items[:] = [*first, *quick[:begun], *second, *quick[begun:]]


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, object, object]:
    watch = item.config.stash[WATCH]
    watch.begin(item)
    try:
        return (yield)
    finally:
        watch.end()
        if nextitem is not None and nextitem.path != item.path:
            _freeze()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, object, object]:
    item.config.stash[WATCH].end()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    return (yield from item.config.stash[WATCH].call())


@pytest.fixture(autouse=True)
def _denormals() -> Generator[None]:
    """A run in this process flushes them; the next test has them again."""
    yield
    import torch  # here: the process that deals tests out to the workers needs none, and they begin 2 s sooner

    torch.set_flush_denormal(False)


@pytest.fixture
def without_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disks answer ``flock`` as some network file systems do."""

    def flock(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr(fcntl, "flock", flock)
