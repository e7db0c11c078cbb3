"""A step of a team runs what was compiled before: its Python calls are bounded."""

from __future__ import annotations

from tests.helpers.calls import calls_of_a_step, strategy_of

TRANSPORT = ("comm/thread_comm.py", "comm/objects.py")
"""In the place of Gloo's, which has no Python calls."""


def test_calls_of_a_step() -> None:
    for calls in calls_of_a_step(strategy_of("spatial@2x1")):
        assert sum(count for (file, _), count in calls.items() if file not in TRANSPORT) <= 1250
        assert not [name for (file, name) in calls if file.startswith("space/") and "exchange" in name.lower()]


def test_calls_of_a_pipeline() -> None:
    for calls in calls_of_a_step(strategy_of("1f1b")):
        assert sum(count for (file, _), count in calls.items() if file not in TRANSPORT) <= 410
        assert len({file for file, _ in calls}) <= 18
