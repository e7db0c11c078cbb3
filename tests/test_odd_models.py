"""Models as users and libraries have them: in two stages exact, or refused before the first step with the line.

A few of each kind; ``benchmarks/exactness/ZOO.md`` has all of them, also in four stages and recomputed.
"""

from __future__ import annotations

import pytest

from benchmarks.exactness import measure
from benchmarks.exactness.cells import entry_cells
from benchmarks.exactness.zoo import all_entries
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


def row_in_two_stages(name: str) -> measure.Row:
    (cell,) = entry_cells("zoo", ENTRIES[name], ("2 stages",))
    row = measure.row_of(cell)
    assert row is not None
    return row


@pytest.mark.parametrize("name", long_where(EXACT, *LONG))
def test_it_is_exact_in_two_stages(name: str) -> None:
    row = row_in_two_stages(name)
    assert row["status"] == "passed", row


def test_a_branch_on_data_is_refused_with_its_line() -> None:
    row = row_in_two_stages("odd.flow:BranchesOnData")
    assert row["status"] == "refused", row
    assert "odd/flow.py:" in row["note"]
