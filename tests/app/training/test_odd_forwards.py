"""Models that do in forward what few do are computed exactly, or refused in one message. They ended in tracebacks."""

from __future__ import annotations

from typing import Any

import pytest

from app.settings.strategy import StrategySettings
from app.verify import VerifyCommand, verify
from tests.helpers.lanes import long_where

STRATEGIES: dict[str, dict[str, Any]] = {
    "recompute": {"parallel": "single", "recompute": "block"},
    "1f1b": {"parallel": "1f1b", "ranks": 2},
    "stream": {"parallel": "single", "stream": "8"},
    "1f1b, stream": {"parallel": "1f1b", "ranks": 2, "stream": "8"},
    "spatial": {"parallel": "spatial", "ranks": 2, "grid": "2x1"},
}
EXACT = (
    *("Noisy", "NoisyScale", "NoisyScales", "NoisyLike", "Constant", "functional_call_inside", "noisy_inside"),
    *("constant_inside", "keeps_by_hook_inside", "keeps_in_list_inside"),
)
QUICK = ("recompute", "1f1b, stream", "spatial")
"""The second is both others at once, and stands for them in the quick lane."""
BY_NAME = long_where(STRATEGIES, *set(STRATEGIES) - set(QUICK))
REFUSED = {
    "FunctionalCall": r"FunctionalCall does not follow its own code .*between.*submodule",
    "KeepsByHook": r"KeepsByHook itself cannot be cut .*a hook keeps.*between.*submodule",
    "KeepsInList": r"KeepsInList itself cannot be cut .*a hook keeps.*between.*submodule",
}


def error(model: str, **strategy: Any) -> float:
    asked = StrategySettings(batch=4, microbatches=2, **strategy)
    result = verify(VerifyCommand(asked, model=f"tests.helpers.odd_nets:{model}", tile=16, steps=2))
    assert result is not None
    return result.max_relative_error


@pytest.mark.parametrize("strategy", BY_NAME)
@pytest.mark.parametrize("model", EXACT)
def test_most_are_exact(model: str, strategy: str) -> None:
    assert error(model, **STRATEGIES[strategy]) <= 1e-11


@pytest.mark.parametrize("strategy", BY_NAME)
@pytest.mark.parametrize("model", REFUSED)
def test_others_are_refused_in_one_message(model: str, strategy: str) -> None:
    assert error(model, parallel="single") == 0
    with pytest.raises(ValueError, match=REFUSED[model]):
        error(model, **STRATEGIES[strategy])
