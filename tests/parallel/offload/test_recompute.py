"""Segments that are recomputed, and what may not change between their two passes."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import Tensor, nn

from parallel.offload.packing import ActivationMeter, SavedTensor, put_away, saving, storages_of
from parallel.offload.recompute import CheckpointedSegment


def recomputed(layer: nn.Linear, x: Tensor) -> Tensor:
    def compute(value: Tensor) -> tuple[Tensor]:
        return (layer(value).exp(),)

    state = storages_of(layer.parameters())
    segment = CheckpointedSegment(
        compute, put_away([x], SavedTensor), SavedTensor, state, layer.parameters(), contextlib.nullcontext()
    )
    (output,) = segment.forward([x])
    return output


def test_a_parameter_updated_between_forward_and_recompute_is_autograds_error() -> None:
    layer, x = nn.Linear(3, 3), torch.randn(2, 3)
    recomputed(layer, x).sum().backward()
    expected = torch.autograd.grad(layer(x).exp().sum(), list(layer.parameters()))
    assert all(torch.equal(p.grad, gradient) for p, gradient in zip(layer.parameters(), expected, strict=True))
    output = recomputed(layer, x)
    torch.optim.SGD([layer.bias], lr=0.1).step()  # nothing saves a bias, and exp would be another
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


def test_a_weight_updated_under_hooks_is_autograds_error() -> None:
    """Autograd does not look at versions where hooks are at work, as under --offload."""
    layer, meter = nn.Linear(3, 3), ActivationMeter()
    with saving(lambda tensor: SavedTensor(tensor, meter), storages_of(layer.parameters())):
        output = layer(torch.randn(2, 3, requires_grad=True))
    assert meter.bytes == 24
    with torch.no_grad():
        layer.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()
