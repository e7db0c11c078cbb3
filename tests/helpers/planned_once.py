"""One trace per worker of each model that tests plan over and over, as if all their plans were of one command.

Workloads of a model share what the planner asks of it once, as ``Workload.at`` has it for other tiles. That a model
which is traced anew gives the same is for ``tests/app/planning/test_regions.py``, which does without.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import pytest

from app.planning.workload import Workload

_init = Workload.__init__
_KNOWN: dict[object, Workload] = {}
"""By all that was asked, and the first of each model by all but its tiles."""

_sharing = False


@functools.wraps(_init)
def _shared(work: Workload, *args: Any, **named: Any) -> None:
    global _sharing
    _init(work, *args, **named)
    if _sharing:  # ``at`` makes a workload, too
        return
    asked = {field.name: getattr(work, field.name) for field in dataclasses.fields(work) if field.compare}
    whole = tuple(asked.items())
    model = tuple((name, value) for name, value in whole if name != "tile")
    first = _KNOWN.setdefault(model, work)
    if whole in _KNOWN:
        vars(work).update(vars(_KNOWN[whole]))
    elif first is not work:
        _sharing = True
        vars(work).update(vars(first.at(work.tile)))
        _sharing = False
    _KNOWN[whole] = work


@contextlib.contextmanager
def plans_shared() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Workload, "__init__", _shared)
        yield


@pytest.fixture(scope="module", autouse=True)
def planned_once() -> Iterator[None]:
    """Before other fixtures of a module that imports it, which plan, too."""
    with plans_shared():
        yield
