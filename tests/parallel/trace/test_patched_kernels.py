"""Torch's functions that are replaced: the numbers are right; a test reports when torch needs no help any more."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from app.settings.strategy import StrategySettings
from app.training import exactness, plain_training
from app.verify import VerifyCommand, verify
from parallel.trace.patched_kernels import CHANNELS, conv2d, patch_kernels

CLOSE = torch.channels_last


class OwnNorm(nn.InstanceNorm2d):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + 1


NORMS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "instance norm": (nn.InstanceNorm2d(4).double(), lambda y: y),
    "with weights": (nn.InstanceNorm2d(4, affine=True).double(), lambda y: y),
    "a user's own": (OwnNorm(4).double(), lambda y: y),
    "a function": (lambda x: F.instance_norm(x), lambda y: y),
    "batch norm and a view": (nn.BatchNorm2d(4).double(), lambda y: y.view(y.shape)),
    "batch norm, changed in place": (nn.BatchNorm2d(4).double(), lambda y: y.relu_().view(y.shape)),
}


def input_gradient(norm: Any, after: Any, x: Tensor, gradient: Tensor) -> Tensor:
    x = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    after(norm(x)).backward(gradient)
    return x.grad


@pytest.mark.parametrize("layout", [torch.contiguous_format, CLOSE])
@pytest.mark.parametrize("tiles", [1, 2])
@pytest.mark.parametrize("name", NORMS)
def test_gradients_of_any_layout_are_alike(name: str, tiles: int, layout: torch.memory_format) -> None:
    patch_kernels()
    norm, after = NORMS[name]
    torch.manual_seed(0)
    x, gradient = torch.randn(2, tiles, 4, 6, 6, dtype=torch.float64)
    expected = input_gradient(norm, after, x, gradient)
    found = input_gradient(norm, after, x.contiguous(memory_format=layout), gradient.contiguous(memory_format=CLOSE))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)


class Normed(nn.Module):
    def __init__(self, classes: int) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(n, 4, 3, padding=1) for n in (3, 4, 4, 4))
        self.norm, self.own, self.head = nn.InstanceNorm2d(4), OwnNorm(4, affine=True), nn.Linear(4, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.convs[1](self.norm(self.convs[0](x)))
        x = self.convs[2](F.instance_norm(torch.tanh(x)))
        x = self.convs[3](self.own(torch.tanh(x)))
        logits: Tensor = self.head(torch.tanh(x).mean((2, 3)))
        return logits


RECOMPUTED: list[dict[str, Any]] = [
    {"parallel": "1f1b", "ranks": 2, "recompute": "stage"},
    {"parallel": "ddp", "ranks": 2, "recompute": "block", "offload": "overlap"},
]
IN_PARTS: list[dict[str, Any]] = [
    {"parallel": "single", "stream": "16"},
    {"parallel": "zero-bubble", "ranks": 2},
    {"parallel": "spatial", "ranks": 2, "grid": "2x1"},
]
"""Strategies that call a layer's kernels by parts."""


@pytest.mark.parametrize("strategy", RECOMPUTED)
def test_gradients_are_those_of_contiguous_tiles(strategy: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The plain step of ``verify`` is helped, too: here it computes in the layout that torch gets right."""

    class OnContiguous(plain_training.PlainTraining):
        def __init__(self, trial: plain_training.ExactnessTrial) -> None:
            super().__init__(dataclasses.replace(trial, channels_last=False))

    monkeypatch.setattr(exactness, "PlainTraining", OnContiguous)
    asked = StrategySettings(batch=2, microbatches=2, **strategy)
    result = verify(VerifyCommand(asked, model=f"{__name__}:Normed", tile=16, steps=2))
    assert result["max_relative_error"] <= 1e-12


CHILD = """
import sys, torch
from parallel.trace.patched_kernels import patch_kernels
if sys.argv[1] == "mended":
    patch_kernels()
torch.set_num_threads(1)
for channels in (4, 8, 15):
    layer = torch.nn.Conv2d(channels, 8, 1, stride=2).to(memory_format=torch.channels_last)
    for _ in range(5):
        x = torch.randn(2, channels, 96, 96).contiguous(memory_format=torch.channels_last).requires_grad_()
        layer(x).sum().backward()
        spread = [torch.empty(size) for size in (10, 100, 1000, 10000)]
"""
"""In one with the fault it ends by a signal, in most runs within two passes."""


def gradients(function: Any, x: Tensor, weight: Tensor, **how: Any) -> list[Tensor]:
    x, weight = (value.detach().clone(memory_format=torch.preserve_format).requires_grad_() for value in (x, weight))
    y = function(x, weight, None, **how)
    y.backward(torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view(y.shape))
    return [y.detach(), x.grad, weight.grad]


@pytest.mark.parametrize("layout", [torch.contiguous_format, CLOSE])
@pytest.mark.parametrize(
    ("kernel", "how"),
    [
        (1, {"stride": 2}),
        (1, {"stride": (2, 1)}),
        (1, {"stride": [1, 3], "padding": "valid"}),
        (1, {"stride": (2,), "padding": (0, 0)}),
        (1, {"stride": 2, "padding": 1}),
        (3, {"stride": 2, "padding": 1}),
        (1, {}),
    ],
)
def test_the_numbers_are_torchs(kernel: int, how: dict[str, Any], layout: torch.memory_format) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 5, 11, 14, dtype=torch.float64).contiguous(memory_format=layout)
    weight = torch.randn(4, 5, kernel, kernel, dtype=torch.float64).contiguous(memory_format=layout)
    found, expected = gradients(conv2d, x, weight, **how), gradients(torch.conv2d, x, weight, **how)
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-13)
    assert found[0].stride() == expected[0].stride()  # of the output: the layers behind keep their layout


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[tuple[int, ...], Any]]:
    found: list[tuple[tuple[int, ...], Any]] = []
    right = torch.conv2d

    def noted(input: Tensor, weight: Tensor, bias: Any, stride: Any, *more: Any) -> Tensor:
        if input.device.type == "cpu":  # nothing is computed on meta
            found.append((tuple(weight.shape), stride))
        return right(input, weight, bias, stride, *more)

    monkeypatch.setattr(torch, "conv2d", noted)
    return found


@pytest.mark.parametrize(
    ("layer", "stride"),
    [
        (nn.Conv2d(8, 8, 1, stride=2), (1, 1)),
        (nn.Conv2d(CHANNELS, 8, 1, stride=2), (2, 2)),
        (nn.Conv2d(8, 8, 1, stride=2, groups=2), (2, 2)),
        (nn.Conv2d(8, 8, 3, stride=2), (2, 2)),
    ],
)
def test_only_what_torch_gets_wrong_is_changed(layer: nn.Conv2d, stride: Any, calls: list[Any]) -> None:
    patch_kernels()
    layer(torch.zeros(1, layer.in_channels, 8, 8))
    assert calls == [(tuple(layer.weight.shape), stride)]


class OwnConvolution(nn.Conv2d):
    """A layer that names its numbers, which zero-bubble splits as well."""

    def forward(self, input: Tensor) -> Tensor:
        return F.conv2d(input, self.weight, self.bias, stride=2, padding=1)


class Strided(nn.Module):
    def __init__(self, classes: int) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 1, stride=2)
        self.own = OwnConvolution(8, 8, 3)
        self.third, self.head = nn.Parameter(torch.randn(6, 8, 1, 1)), nn.Linear(6, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.own(torch.tanh(self.second(torch.tanh(self.first(x))))))
        logits: Tensor = self.head(torch.tanh(F.conv2d(x, self.third, stride=2)).mean((2, 3)))
        return logits


@pytest.mark.parametrize("strategy", IN_PARTS)
def test_every_strategy_computes_them_so(strategy: dict[str, Any], calls: list[Any]) -> None:
    asked = StrategySettings(batch=2, microbatches=2, **strategy)
    result = verify(VerifyCommand(asked, model=f"{__name__}:Strided", tile=32, steps=1))
    assert result["passed"], result
    assert {(8, 8, 1, 1), (6, 8, 1, 1)} <= {shape for shape, _ in calls}
    assert all(stride == (1, 1) for shape, stride in calls if shape[2:] == (1, 1))


@pytest.mark.filterwarnings("ignore:.torch.jit")
def test_modules_can_still_be_scripted_and_traced() -> None:
    patch_kernels()
    x = torch.ones(1, 4, 6, 6)
    for layer in (nn.Conv2d(4, 4, 1, stride=2), nn.BatchNorm2d(4), nn.InstanceNorm2d(4)):
        assert torch.equal(torch.jit.script(layer)(x), layer(x))
    assert torch.equal(fx.symbolic_trace(Strided(2))(torch.ones(1, 3, 8, 8)).sum(1).isnan(), torch.tensor([False]))


def ended(how: str) -> int:
    return subprocess.run([sys.executable, "-c", CHILD, how], capture_output=True, timeout=120).returncode


@pytest.mark.process
def test_the_heap_stays_whole() -> None:
    assert ended("mended") == 0


@pytest.mark.parametrize("what", ["norms", pytest.param("conv2d", marks=pytest.mark.process)])
def test_torch_still_needs_help(what: str) -> None:
    """A warning says that it needs no patch."""
    if what == "norms":
        torch.manual_seed(0)
        x, gradient = torch.randn(2, 1, 4, 6, 6, dtype=torch.float64)
        norm = lambda images: torch.instance_norm(images, None, None, None, None, True, 0.1, 1e-5, False)  # noqa: E731
        expected = input_gradient(norm, lambda y: y, x, gradient)
        found = input_gradient(norm, lambda y: y, x, gradient.contiguous(memory_format=CLOSE))
        wrong = float((found - expected).abs().max()) > 0.1
    else:
        wrong = any(ended("plain") for _ in range(3))
    if not wrong:
        with warnings.catch_warnings():
            warnings.simplefilter("default")
            warnings.warn(f"torch {torch.__version__} is right here: remove {what} of patched_kernels.py", stacklevel=1)
