"""Drawing for a stage is seen nowhere else. That stages draw what the plain model draws is for the tests of engines."""

from __future__ import annotations

import pytest
import torch

from parallel.offload.rng import drawing, get_random_state, set_random_state

CPU = torch.device("cpu")


def test_the_program_around_it_sees_nothing_even_after_an_error() -> None:
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    with pytest.raises(TypeError), drawing(5, CPU):
        torch.rand("four")
    assert torch.equal(torch.rand(2), expected)


def test_a_state_of_another_kind_of_device_is_refused() -> None:
    with pytest.raises(ValueError, match=r"a random state for cpu is \d+ bytes of uint8, got \(3,\)"):
        set_random_state(get_random_state(CPU)[:3], CPU)
