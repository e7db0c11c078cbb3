"""Work on slides in this process, where the commands start helper processes for it: most of a test's time otherwise.

The processes themselves are for ``tests/pipelines/catalog/test_processes.py``. A test that needs them asks for
``in_processes``.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch  # noqa: F401  starts a process when it is first imported, which a test may not

from pipelines.catalog import processes

MODULES = (
    "app.checks.slides",
    "app.pages.pictures",
    "app.prediction.share",
    "pipelines.tiles.index",
    "pipelines.tiles.stain",
    "pipelines.tiles.windows",
)
"""Those that call ``map_isolated``."""


def each_at_once(task: Any, items: Sequence[Any], workers: int, limits: object = None) -> Iterator[tuple[Any, Any]]:
    """Yield what ``map_isolated`` yields. Task and items are pickled, as for another process."""
    for item in items:
        copied_task, copied_item = pickle.loads(pickle.dumps((task, item)))
        yield item, copied_task(copied_item)


@pytest.fixture(scope="module", autouse=True)
def at_once() -> Iterator[None]:
    """Replace ``map_isolated`` before other fixtures of a module, which index, too."""
    with pytest.MonkeyPatch.context() as patch:
        for module in MODULES:
            patch.setattr(f"{module}.map_isolated", each_at_once)
        yield


@pytest.fixture
def in_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the modules their ``map_isolated`` back."""
    for module in MODULES:
        monkeypatch.setattr(f"{module}.map_isolated", processes.map_isolated)
