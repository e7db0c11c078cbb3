"""Measured layers: each has a time, and the model stays as it is."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from benchmarks.plan_accuracy.layer_measured import measure
from parallel.trace.trace import trace
from tests.helpers.small_nets import FourierNet, SkipNet, TwoOutputs

CPU = torch.device("cpu")
SHAPE = (1, 3, 64, 64)


@pytest.mark.parametrize("build", [SkipNet, TwoOutputs, FourierNet])
def test_every_layer_is_measured(build) -> None:
    torch.manual_seed(0)
    traced = trace(build(), SHAPE)
    costs = measure(traced, SHAPE, CPU, repeats=1)
    assert len(costs.layers) == len(traced.graph.layers)
    for layer, cost in zip(traced.graph.layers, costs.layers, strict=True):
        assert (cost.forward_s > 0) == (layer.kind not in ("input", "output", "get_attr")), layer
        assert cost.backward_s > 0 or not layer.differentiable or layer.kind in ("output", "get_attr"), layer
    assert costs.source == "measured at 64 px"
    assert costs.expected_error is not None


def test_layers_with_weights_have_two_halves_and_the_first_only_one() -> None:
    torch.manual_seed(0)
    traced = trace(nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3)), SHAPE)
    costs = measure(traced, SHAPE, CPU, repeats=2)
    first, second = costs.layers[1:3]
    assert first.backward_input_s == 0 < first.backward_s
    assert second.backward_input_s > 0


def test_the_model_stays_as_it_is() -> None:
    torch.manual_seed(0)
    model = SkipNet().eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    traced = trace(model, SHAPE)
    state = torch.get_rng_state()
    measure(traced, SHAPE, CPU, repeats=1)
    assert torch.equal(torch.get_rng_state(), state)
    assert not any(part.training for part in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
