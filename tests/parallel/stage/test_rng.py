"""Drawing for a stage is seen nowhere else. That stages draw what the plain model draws is for the tests of engines."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from parallel.offload.rng import drawing, get_random_state, set_random_state

CPU = torch.device("cpu")


def drawn() -> list[float]:
    """Numbers of every generator; normal ones are drawn in pairs, of which the second is kept."""
    of_numpy = [np.random.rand(), np.random.randn()]  # noqa: NPY002
    return [*torch.rand(2).tolist(), random.random(), random.gauss(), *of_numpy]


def test_the_program_around_it_sees_nothing_even_after_an_error() -> None:
    drawn()  # so that normal numbers are kept
    before = get_random_state(CPU)
    expected = drawn()
    set_random_state(before, CPU)
    with pytest.raises(TypeError), drawing(5, CPU):
        torch.rand(f"{drawn()} tiles")
    assert drawn() == expected


def test_a_pass_continues_from_where_another_ended() -> None:
    with drawing(5 << 40, CPU) as first:
        before = drawn()
    with drawing(first.end, CPU):
        expected = drawn()
    with drawing(5 << 40, CPU):
        assert [drawn(), drawn()] == [before, expected]


def test_a_state_of_another_kind_of_device_is_refused() -> None:
    with pytest.raises(ValueError, match=r"a random state for cpu is \d+ bytes of uint8, got \(3,\)"):
        set_random_state(get_random_state(CPU)[:3], CPU)
