"""Norms of one tile and gradients in any layout; the test that fails by itself once torch needs no help any more."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from app.settings.strategy import StrategySettings
from app.verify import VerifyCommand, verify
from parallel.trace.norm_gradients import mend_norm_gradients

CLOSE = torch.channels_last


class Own(nn.InstanceNorm2d):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + 1


NORMS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "instance norm": (nn.InstanceNorm2d(4).double(), lambda y: y),
    "with weights": (nn.InstanceNorm2d(4, affine=True).double(), lambda y: y),
    "a user's own": (Own(4).double(), lambda y: y),
    "a function": (lambda x: F.instance_norm(x), lambda y: y),
    "batch norm and a view": (nn.BatchNorm2d(4).double(), lambda y: y.view(y.shape)),
    "batch norm, changed in place": (nn.BatchNorm2d(4).double(), lambda y: y.relu_().view(y.shape)),
}


def input_gradient(norm: Any, after: Any, x: Tensor, gradient: Tensor) -> Tensor:
    x = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    after(norm(x)).backward(gradient)
    assert x.grad is not None
    return x.grad


@pytest.mark.parametrize("layout", [torch.contiguous_format, CLOSE])
@pytest.mark.parametrize("tiles", [1, 2])
@pytest.mark.parametrize("name", NORMS)
def test_gradients_of_any_layout_are_alike(name: str, tiles: int, layout: torch.memory_format) -> None:
    mend_norm_gradients()
    norm, after = NORMS[name]
    torch.manual_seed(0)
    x, gradient = torch.randn(2, tiles, 4, 6, 6, dtype=torch.float64)
    expected = input_gradient(norm, after, x, gradient)
    found = input_gradient(norm, after, x.contiguous(memory_format=layout), gradient.contiguous(memory_format=CLOSE))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)


def test_torch_still_needs_help() -> None:
    """Of what instance norm is made of. A warning says that ``parallel/trace/norm_gradients.py`` can go."""
    torch.manual_seed(0)
    x, gradient = torch.randn(2, 1, 4, 6, 6, dtype=torch.float64)
    own = torch.instance_norm  # not through torch.nn.functional
    norm = lambda images: own(images, None, None, None, None, True, 0.1, 1e-5, False)  # noqa: E731
    expected = input_gradient(norm, lambda y: y, x, gradient)
    found = input_gradient(norm, lambda y: y, x, gradient.contiguous(memory_format=CLOSE))
    if torch.allclose(expected, found):
        with warnings.catch_warnings():
            warnings.simplefilter("default")
            warnings.warn(f"torch {torch.__version__} has mended it: remove norm_gradients.py", stacklevel=1)
    else:
        assert float((found - expected).abs().max()) > 0.1


def normed(classes: int) -> nn.Module:
    """Tiles of one microbatch go through every kind of norm that torch made wrong."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convs = nn.ModuleList(nn.Conv2d(n, 4, 3, padding=1) for n in (3, 4, 4, 4))
            self.norm, self.own, self.head = nn.InstanceNorm2d(4), Own(4, affine=True), nn.Linear(4, classes)

        def forward(self, x: Tensor) -> Tensor:
            x = self.convs[1](self.norm(self.convs[0](x)))
            x = self.convs[2](F.instance_norm(torch.tanh(x)))
            x = self.convs[3](self.own(torch.tanh(x)))
            logits: Tensor = self.head(torch.tanh(x).mean((2, 3)))
            return logits

    return Net()


@pytest.mark.parametrize(
    "strategy",
    [
        {"parallel": "single"},
        {"parallel": "single", "recompute": "block", "offload": "overlap"},
        {"parallel": "ddp", "ranks": 2},
        {"parallel": "1f1b", "ranks": 2, "recompute": "stage"},
        {"parallel": "master", "ranks": 2, "recompute": "block"},
    ],
)
def test_gradients_are_those_of_contiguous_tiles(strategy: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The plain step of ``verify`` is helped, too: here it computes in the layout that torch gets right."""
    from app.training import exactness

    class OnContiguous(exactness.PlainTraining):
        def __init__(self, trial: exactness.ExactnessTrial) -> None:
            super().__init__(dataclasses.replace(trial, channels_last=False))

    monkeypatch.setattr(exactness, "PlainTraining", OnContiguous)
    asked = StrategySettings(batch=2, microbatches=2, **strategy)
    result = verify(VerifyCommand(asked, model=f"{__name__}:normed", tile=16, steps=2))
    assert result is not None
    assert result.max_relative_error <= 1e-12


@pytest.mark.filterwarnings("ignore:.torch.jit")
def test_modules_can_still_be_scripted() -> None:
    mend_norm_gradients()
    x = torch.ones(1, 4, 6, 6)
    for norm in (nn.BatchNorm2d(4), nn.InstanceNorm2d(4)):
        assert torch.equal(torch.jit.script(norm)(x), norm(x))
