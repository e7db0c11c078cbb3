"""What a process does before it computes anything."""

from __future__ import annotations

import torch

from app.launch.place import place
from app.settings.strategy import StrategySettings


def test_denormal_numbers_are_zero_on_a_cpu() -> None:
    tiny = torch.full((1000,), 1e-39)
    assert (tiny * 0.5).any()
    place(StrategySettings("single", device="cpu"))
    assert not (tiny * 0.5).any()
