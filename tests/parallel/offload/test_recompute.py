"""Segments that are recomputed, what may not change before a backward pass, and the meter by hand-counted models."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
from torch import Tensor, nn
from torchvision.models import resnet18

from parallel.offload.packing import ActivationMeter, SavedTensor, put_away, storages_of
from parallel.offload.saved_tensors import CheckpointedSegment


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
    meter.peak_bytes = meter.bytes
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
