"""A split backward pass gives the gradients of plain autograd, keeps no more than it must, and refuses the rest."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from parallel.offload.packing import ActivationMeter
from parallel.stage.split_backward import DeferredWeights

LAYERS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "conv1d": (lambda: nn.Conv1d(4, 6, 3, stride=2, padding=1), (2, 4, 11)),
    "conv2d": (lambda: nn.Conv2d(4, 6, 3, dilation=2), (2, 4, 9, 8)),
    "conv3d": (lambda: nn.Conv3d(2, 3, 2), (2, 2, 4, 5, 4)),
    "same": (lambda: nn.Conv2d(4, 6, (4, 3), padding="same"), (2, 4, 9, 8)),
    "valid": (lambda: nn.Conv2d(4, 6, 3, padding="valid"), (2, 4, 9, 8)),
    "reflect": (lambda: nn.Conv2d(4, 6, 3, padding=1, padding_mode="reflect"), (2, 4, 9, 8)),
    "circular same": (lambda: nn.Conv2d(4, 6, 4, padding="same", padding_mode="circular"), (2, 4, 9, 8)),
    "groups": (lambda: nn.Conv2d(4, 6, 3, groups=2, bias=False), (2, 4, 9, 8)),
    "unbatched": (lambda: nn.Conv2d(4, 6, 3), (4, 9, 8)),
    "transposed1d": (lambda: nn.ConvTranspose1d(4, 6, 3, stride=2, output_padding=1), (2, 4, 5)),
    "transposed2d": (lambda: nn.ConvTranspose2d(4, 6, 3, stride=2, groups=2, dilation=2), (2, 4, 5, 6)),
    "transposed3d": (lambda: nn.ConvTranspose3d(2, 3, 2, padding=1), (2, 2, 4, 5, 4)),
    "linear": (lambda: nn.Linear(5, 3), (7, 5)),
    "linear of maps": (lambda: nn.Linear(5, 3), (2, 4, 5)),
    "linear of a vector": (lambda: nn.Linear(5, 3, bias=False), (5,)),
}


def gradients(module: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


def assert_same(found: nn.Module, expected: nn.Module, tolerance: float = 1e-10) -> None:
    ours, plain = gradients(found), gradients(expected)
    assert {name: (g.dtype, g.stride()) for name, g in ours.items()} == {
        name: (g.dtype, g.stride()) for name, g in plain.items()
    }
    for name, gradient in plain.items():
        assert (ours[name] - gradient).abs().max() <= tolerance * gradient.abs().max(), name


@pytest.mark.filterwarnings("ignore:Using padding=.same. with even kernel")  # torch's, of the plain layer
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("kind", LAYERS)
def test_every_kind_of_layer(kind: str, first: bool) -> None:
    make, shape = LAYERS[kind]
    torch.manual_seed(0)
    plain = nn.Sequential(make(), nn.ReLU(inplace=True)).double()
    split = copy.deepcopy(plain)
    deferred = DeferredWeights(split)
    inputs = [torch.randn(shape, dtype=torch.float64) for _ in range(3)]
    ours, theirs = ([x.clone().requires_grad_(not first) for x in inputs] for _ in range(2))
    outputs = []
    for key, x in enumerate(ours):
        with deferred.recording(key):
            outputs.append(split(x))
    for x, output in zip(theirs, outputs, strict=True):
        expected = plain(x)
        assert torch.equal(expected, output)
        expected.square().sum().backward()
    for key in (1, 0, 2):
        outputs[key].square().sum().backward()
        if key == 0:
            deferred.backward_weight(1)
    for x, y in zip(ours, theirs, strict=True):
        assert first or torch.allclose(x.grad, y.grad, rtol=1e-10, atol=1e-12)
    deferred.backward_weight(0)
    deferred.backward_weight(2)
    assert_same(split, plain)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.twice = nn.Conv2d(4, 4, 3, padding=1)
        self.frozen = nn.Conv2d(4, 4, 1).requires_grad_(False)
        self.kernel = nn.Parameter(torch.randn(4, 4, 1, 1))
        self.last = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.first(x)), inplace=True)
        x = self.frozen(self.twice(F.relu(self.twice(x))))
        return self.last(F.conv2d(x, self.kernel).mean((2, 3)))


@pytest.mark.parametrize("mode", ["float64", "float32", "autocast", "channels_last"])
def test_a_net(mode: str) -> None:
    torch.manual_seed(0)
    plain = Net().to(torch.float64 if mode == "float64" else torch.float32)
    if mode == "channels_last":
        plain = plain.to(memory_format=torch.channels_last)
    split = copy.deepcopy(plain)
    deferred = DeferredWeights(split)
    x = torch.randn(2, 3, 8, 8, dtype=plain.kernel.dtype)
    if mode == "channels_last":
        x = x.to(memory_format=torch.channels_last)
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16, enabled=mode == "autocast"):
            expected = plain(x)
            with deferred.recording("key"):
                found = split(x)
        assert torch.equal(expected, found)
        expected.float().square().sum().backward()
        found.float().square().sum().backward()
        missing = {"first.weight", "first.bias", "twice.weight", "twice.bias", "last.weight", "last.bias"}
        if _ == 0:
            assert gradients(split).keys() == gradients(plain).keys() - missing
        deferred.backward_weight("key")
    assert_same(split, plain, {"float64": 1e-10, "autocast": 2e-2}.get(mode, 1e-5))


def test_what_is_kept_is_freed_and_a_step_given_up_leaves_nothing() -> None:
    module = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Conv2d(2, 1, 3))
    plain, meter = copy.deepcopy(module), ActivationMeter()
    deferred = DeferredWeights(module, meter)
    image, kept = torch.randn(1, 1, 8, 8), (64 + 2 * 36) * 4
    for _ in range(2):  # the first is given up
        with meter.watching(module.parameters()), deferred.recording(0):
            output = module(image)
        output.square().sum().backward()
        output = None
        assert meter.bytes == kept + (2 * 36 + 16) * 4
    deferred.backward_weight(0)
    assert meter.bytes == 0
    plain(image).square().sum().backward()
    torch.testing.assert_close(module[1].weight.grad, plain[1].weight.grad)


def test_bias_alone_trainable_is_left_to_autograd() -> None:
    module = nn.Sequential(nn.Linear(3, 2))
    module[0].weight.requires_grad_(False)
    deferred = DeferredWeights(module)
    with deferred.recording(0):
        output = module(torch.ones(1, 3))
    output.sum().backward()
    deferred.backward_weight(0)
    assert torch.equal(module[0].bias.grad, torch.ones(2))


def test_refusals_name_every_layer() -> None:
    hooked, watched = nn.Linear(2, 2), nn.Conv2d(1, 1, 1)
    hooked.weight.register_post_accumulate_grad_hook(lambda p: None)
    watched.register_full_backward_hook(lambda *a: None)
    module = nn.Sequential(weight_norm(nn.Linear(2, 2)), hooked, watched)
    with pytest.raises(ValueError, match=r"0 has a parametrized.*1 has hooks on its weight.*2 has hooks"):
        DeferredWeights(module)
    with pytest.raises(ValueError, match="no convolution or linear layer"):
        DeferredWeights(nn.BatchNorm2d(3))
