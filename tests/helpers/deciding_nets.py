"""Models whose forward asks what its values are: a class, a shape, a type; and what else Python does with them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.helpers.awkward_nets import Linears


class AsksForTensors(Linears):
    """As MONAI's UpCat: without a tensor, the skip is left out."""

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.a(x))
        if isinstance(x, Tensor) and torch.is_tensor(y) and hasattr(y, "shape") and not hasattr(y, "features"):
            y = self.b(y) + x
        return self.d(torch.tanh(self.c(y)))


class ChecksShapes(Linears):
    """As the models of segmentation_models_pytorch; also assert, and an early return."""

    def forward(self, x: Tensor) -> Tensor:
        n, width = x.shape
        if width % 2 != 0:
            raise RuntimeError(f"odd width {width}")
        assert x.dim() == 2
        assert len(x.shape) == 2, "a matrix"
        y = torch.tanh(self.a(x)).view(n, width)
        for _ in range(width // 3):
            y = torch.tanh(self.b(y))
        if y.shape != x.shape or y.size(1) > 100:
            return y
        places = torch.arange(width, dtype=x.dtype, device=x.device)
        z = self.c(y + places) * max(width, 3) / int(x.shape[-1])
        if width == 6:
            return self.d(torch.tanh(z)).reshape(n, -1)
        return z


class FrozenTrunk(nn.Module):
    """Nothing flows back into a trunk, some of whose parameters want a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(6, 6)
        self.trunk = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.ReLU(inplace=True), nn.Linear(6, 6))
        self.head, self.last = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        with torch.no_grad():
            features = self.trunk(x) * 2
            features = features + x
        return self.last(torch.tanh(self.head(features) + x))


class Doubled(torch.autograd.Function):
    """Its gradient is not that of its forward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, by: float) -> Tensor:
        ctx.by = by
        return x * by

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gradient * (ctx.by + 1), None


class OwnGradient(Linears):
    def forward(self, x: Tensor) -> Tensor:
        y = Doubled.apply(torch.tanh(self.a(x)), 2.0)
        return self.d(torch.tanh(self.c(Doubled.apply(self.b(y), 3.0))))


class WritesInPlaces(Linears):
    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.a(x)) * 1.0
        y[:, 0] = x[:, 1]
        y[:, 1:3] *= 2
        y = self.c(torch.tanh(self.b(y)))
        y[y < 0] = 0.5
        return self.d(y)


class OfWaves(Linears):
    def forward(self, x: Tensor) -> Tensor:
        waves = torch.fft.rfft(torch.tanh(self.a(x)))
        y = torch.fft.irfft(waves * 2, n=x.shape[-1])
        return self.d(torch.tanh(self.c(self.b(y))))


class ComputedAgain(Linears):
    """As its author asks for: a checkpoint in the model's own forward."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(self.b, torch.tanh(self.a(x)), use_reentrant=False)
        return self.d(torch.tanh(self.c(y)))


class Pyramid(Linears):
    """Kept whole, since it decides by the number of tiles; gives a list, a dict and nothing."""

    layers = "ab"

    def forward(self, x: Tensor) -> tuple[list[Tensor], dict[str, Tensor], None]:
        x = self.a(x) if x.shape[0] > 1 else self.a(x) * 1.0
        levels = [x, torch.tanh(x), self.b(x)]
        return levels, {"last": levels[-1], "first": x}, None


class Unpacks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.pyramid, self.c, self.d = nn.Linear(6, 6), Pyramid(), nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        levels, named, mask = self.pyramid(torch.tanh(self.before(x)))
        if not isinstance(levels, (list, tuple)) or mask is not None:
            return levels
        *others, last = levels
        y = sum(others) + last
        for name, value in named.items():
            y = y + value if name == "last" else y - value
        return self.d(torch.tanh(self.c(y)))


DECIDING = [AsksForTensors, ChecksShapes, FrozenTrunk, OwnGradient, WritesInPlaces, ComputedAgain, Unpacks]


class ByBatch(nn.Module):
    """Decides by the number of tiles."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) if x.shape[0] > 1 else torch.relu(self.a(x))


class Gate(nn.Module):
    """Decides by data."""

    def forward(self, x: Tensor) -> Tensor:
        if x.mean() > 0:
            x = x * 2
        return x


class Gated(nn.Module):
    """A trunk and a head with a decision by data between them.

    Args:
        wrapped: the decision has a module of its own, as the refusal of the other advises.
    """

    def __init__(self, *, wrapped: bool) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
        self.head = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
        self.gate = Gate() if wrapped else None

    def forward(self, x: Tensor) -> Tensor:
        x = self.trunk(x)
        if self.gate is not None:
            x = self.gate(x)
        elif x.mean() > 0:
            x = x * 2
        y: Tensor = self.head(x)
        return y


class ByWidth(nn.Module):
    """Decides by the width of its tiles, and would run on any."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv1d(3, 3, 1), nn.Conv1d(3, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        if x.shape[-1] > 10:
            x = x[..., ::2]
        return self.b(x)
