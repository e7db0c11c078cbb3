"""A step runs what was compiled before: its Python calls are bounded."""

from __future__ import annotations

import pytest

from tests.helpers.calls import calls_of_a_step, strategy_of

TRANSPORT = ("comm/thread_comm.py", "comm/objects.py")
"""In the place of Gloo's, which has no Python calls."""


@pytest.mark.parametrize(
    ("strategy", "most", "files"), [("spatial@2x1", 710, 23), ("spatial@2x1+8", 5_700, 38), ("1f1b", 370, 14)]
)
def test_calls_of_a_step(strategy: str, most: int, files: int) -> None:
    for calls in calls_of_a_step(strategy_of(strategy)):
        assert sum(count for (file, _), count in calls.items() if file not in TRANSPORT) <= most
        assert len({file for file, _ in calls}) <= files
        assert not [name for file, name in calls if file.startswith("space/") and "exchange" in name.lower()]
