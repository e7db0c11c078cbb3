"""Models as users and libraries have them: in two stages exact, or refused before the first step with the line.

A few of each kind; all of them, also in four stages and recomputed, are in the table of ``benchmarks/model_zoo``.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.model_zoo import measure
from benchmarks.model_zoo.zoo import all_entries
from tests.helpers.lanes import long_where

ENTRIES = {entry.name: entry for entry in all_entries()}
EXACT = (
    "odd.sharing:TiedWeights",
    "odd.sharing:ReusedModule",
    "odd.sharing:SharedNorm",  # a module with two names was swapped twice and restored wrongly: KeyError
    "odd.sharing:Siamese",
    "odd.sharing:spectral_norm",
    "odd.sharing:adapters",
    "odd.state:queue",
    "odd.state:TrunkWithoutGradients",
    "odd.flow:EarlyReturn",
    "odd.flow:AsksAtRoot",
    "smp:FPN(resnet18)",
)

LONG = ("odd.sharing:ReusedModule", "odd.sharing:Siamese", "odd.sharing:adapters", "odd.flow:AsksAtRoot", EXACT[-1])
"""Each has a relative of the same kind in the quick lane."""


@pytest.fixture(autouse=True)
def uncollected(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engines are small: their memory may wait."""
    monkeypatch.setattr(measure.gc, "collect", lambda: 0)


@pytest.mark.parametrize("name", long_where(EXACT, *LONG))
def test_it_is_exact_in_two_stages(name: str) -> None:
    (row,) = measure.rows_of(replace(ENTRIES[name], ways=("2 stages",)))
    assert row.status == "exact", row


def test_a_branch_on_data_is_refused_with_its_line() -> None:
    (row,) = measure.rows_of(replace(ENTRIES["odd.flow:BranchesOnData"], ways=("2 stages",)))
    assert row.status == "refused", row
    assert "odd/flow.py:" in row.note
