"""Boxes of one shape run one compiled program; the programs that are kept are bounded."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from parallel.streaming import part_plan
from tests.helpers.streaming import in_boxes, streaming_error


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1), nn.MaxPool2d(2))


def test_boxes_of_one_shape_share_a_program() -> None:
    model = net()
    run = in_boxes(model, 8)
    run(model, torch.randn(1, 3, 48, 48))
    part = run.planned.phases[0].parts[0]
    assert len(part.places) == 36
    assert len({id(part.program(*place)) for place in part.places}) == 9, "corners, edges and the inside"


def test_programs_that_were_let_go_of_are_compiled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(part_plan, "MOST_PROGRAMS", 2)
    assert streaming_error(net(), (1, 3, 48, 40), 8) <= 1e-12
