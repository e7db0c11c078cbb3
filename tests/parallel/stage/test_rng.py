"""Stages that draw one after the other draw what the plain model draws."""

from __future__ import annotations

import threading

import pytest
import torch

from parallel.offload.rng import drawing, get_random_state, set_random_state, state_size

CPU = torch.device("cpu")


def test_stages_go_on_where_the_one_before_ended() -> None:
    torch.manual_seed(7)
    plain = torch.rand(5)
    torch.manual_seed(99)
    with drawing(7, CPU) as first:
        found = [torch.rand(2)]
    with drawing(first.end, CPU) as second:
        found.append(torch.rand(3))
    with drawing(first.end, CPU) as again:
        assert torch.equal(torch.rand(3), found[1])
    assert torch.equal(torch.cat(found), plain)
    assert torch.equal(second.end, again.end)
    assert second.end.dtype == torch.uint8
    assert second.end.shape == (state_size(CPU),)


def test_the_program_around_it_sees_nothing_even_after_an_error() -> None:
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    with pytest.raises(TypeError), drawing(5, CPU):
        torch.rand("four")
    assert torch.equal(torch.rand(2), expected)


def test_threads_draw_one_after_the_other() -> None:
    found: list[torch.Tensor] = []

    def draw() -> None:
        with drawing(2, CPU):
            found.append(torch.rand(3))

    other = threading.Thread(target=draw)
    with drawing(1, CPU):
        other.start()
        other.join(timeout=0.2)
        assert not found
        mine = torch.rand(3)
    other.join()
    for seed, numbers in ((1, mine), (2, found[0])):
        torch.manual_seed(seed)
        assert torch.equal(torch.rand(3), numbers)


def test_a_state_of_another_kind_of_device_is_refused() -> None:
    with pytest.raises(ValueError, match=r"a random state for cpu is \d+ bytes of uint8, got \(3,\)"):
        set_random_state(get_random_state(CPU)[:3], CPU)
