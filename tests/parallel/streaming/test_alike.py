"""What is recorded of a step holds for those that compute alike, and for no others."""

from __future__ import annotations

import pytest

from app.planning.workload import Workload
from parallel.streaming import step_record
from parallel.streaming.step_record import record
from parallel.trace.without_data import preserve_module_state


@pytest.mark.parametrize("name", ["resnet18", "torchvision:efficientnet_b0"])
def test_records_are_those_of_every_step_run(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    work = Workload(name, 64, 2)
    traced = work._traced
    region = work._region(traced)
    runs = []
    run = step_record._Recording._run
    monkeypatch.setattr(step_record._Recording, "_run", lambda *given: (runs.append(1), run(*given))[1])
    with preserve_module_state(traced.model):
        traced.model.train()
        few, fewer = record(traced.model, region), len(runs)
        monkeypatch.setattr(step_record._Recording, "_key", lambda self, step: None)
        each = record(traced.model, region)
    assert few == each
    assert fewer < (len(runs) - fewer) * 0.75
