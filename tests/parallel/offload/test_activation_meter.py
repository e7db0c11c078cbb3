"""The meter counts by hand-counted models, changes no result, and ends at zero."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torchvision.models import resnet18

from parallel.offload.packing import ActivationMeter, SavedTensor


def test_each_storage_counts_once() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 5))
    meter = ActivationMeter(model)
    x = torch.randn(2, 3, 8, 8)
    with meter.watching():
        output = model(x)
    # The input, and the output of ReLU, which the linear layer also keeps.
    kept = 4 * (2 * 3 * 64 + 2 * 4 * 36)
    assert meter.bytes == kept
    with meter.watching():
        other = model(x)
    assert meter.bytes == kept + 4 * 2 * 4 * 36
    output.sum().backward()
    assert meter.bytes == kept
    other.sum().backward()
    assert meter.bytes == 0
    assert meter.peak_bytes == kept + 4 * 2 * 4 * 36
    meter.reset_peak()
    assert meter.peak_bytes == 0


def test_held_tensors_count_until_dropped() -> None:
    meter = ActivationMeter()
    x = torch.randn(10)
    held = SavedTensor(x, meter)
    view = SavedTensor(x[3:], meter)
    assert meter.bytes == 40
    del held
    assert meter.bytes == 40
    del view
    assert meter.bytes == 0


def test_resnet_frees_everything_and_has_the_same_gradients() -> None:
    torch.manual_seed(0)
    plain = resnet18(num_classes=3)
    metered = copy.deepcopy(plain)
    meter = ActivationMeter(metered)
    x = torch.randn(2, 3, 32, 32)
    plain(x).square().sum().backward()
    with meter.watching():
        output = metered(x)
    assert meter.bytes > x.nbytes
    output.square().sum().backward()
    del output
    assert meter.bytes == 0
    for expected, found in zip(plain.parameters(), metered.parameters(), strict=True):
        assert torch.equal(expected.grad, found.grad)


def test_a_graph_that_is_dropped_without_backward_counts_no_more() -> None:
    meter = ActivationMeter()
    with meter.watching():
        output = torch.randn(5, requires_grad=True).exp()
    assert meter.bytes == 20
    del output
    assert meter.bytes == 0


def test_a_change_in_place_is_still_an_error() -> None:
    with ActivationMeter().watching():
        output = torch.randn(5, requires_grad=True).exp()
    output.detach().add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()
