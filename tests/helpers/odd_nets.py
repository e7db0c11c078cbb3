"""Models that do in forward what few models do; factories as a user gives them to ``--model``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call


class Base(nn.Module):
    """Two convolutions, with something between them, and a mean."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.head = nn.Linear(4, classes)

    def between(self, x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.second(self.between(torch.tanh(self.first(x)))))
        logits: Tensor = self.head(x.mean((2, 3)))
        return logits


class FunctionalCall(Base):
    """Calls a module with weights that it computes."""

    def __init__(self, classes: int) -> None:
        super().__init__(classes)
        self.inner, self.scale = nn.Conv2d(4, 4, 1), nn.Parameter(torch.ones(4, 1, 1, 1))

    def between(self, x: Tensor) -> Tensor:
        return functional_call(self.inner, {"weight": self.inner.weight * self.scale, "bias": self.inner.bias}, (x,))


class Noisy(Base):
    """Adds noise as large as a map, made on the device of the tiles."""

    def between(self, x: Tensor) -> Tensor:
        return x + torch.rand(x.shape, dtype=x.dtype, device=x.device) if self.training else x


class NoisyScale(Base):
    """Draws a number for each tile and channel."""

    def between(self, x: Tensor) -> Tensor:
        return x * torch.rand(x.shape[0], 4, 1, 1, dtype=x.dtype, device=x.device) if self.training else x


class NoisyLike(Base):
    def between(self, x: Tensor) -> Tensor:
        return x + 0.1 * torch.randn_like(x) if self.training else x


class Constant(Base):
    """Computes with a tensor that is made in forward of numbers alone."""

    def between(self, x: Tensor) -> Tensor:
        return x * torch.tensor([1.0, 2.0, 3.0, 4.0]).view(1, 4, 1, 1).to(x)


class KeepsByHook(Base):
    """Adds what a hook kept of an earlier layer."""

    def __init__(self, classes: int) -> None:
        super().__init__(classes)
        self.kept: dict[str, Tensor] = {}
        self.first.register_forward_hook(self.keep)

    def keep(self, module: nn.Module, given: Any, value: Tensor) -> None:
        self.kept["first"] = value

    def between(self, x: Tensor) -> Tensor:
        return x + self.kept["first"]


class KeepsInList(KeepsByHook):
    """Clears a list that hooks append to."""

    def __init__(self, classes: int) -> None:
        super().__init__(classes)
        self.values: list[Tensor] = []

    def keep(self, module: nn.Module, given: Any, value: Tensor) -> None:
        self.values.append(value)

    def between(self, x: Tensor) -> Tensor:
        x = x + self.values[-1]
        self.values.clear()
        return x


class Wrapped(nn.Module):
    """One of the models above, inside of another."""

    def __init__(self, inner: nn.Module, classes: int) -> None:
        super().__init__()
        self.stem, self.inner, self.head = nn.Conv2d(3, 3, 3, padding=1), inner, nn.Linear(classes, classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.inner(torch.tanh(self.stem(x))))
        return logits


def inside(kind: type[Base]) -> Any:
    """Return a factory of ``Wrapped``."""

    def make(classes: int) -> nn.Module:
        return Wrapped(kind(classes), classes)

    return make


functional_call_inside = inside(FunctionalCall)
noisy_inside = inside(Noisy)
constant_inside = inside(Constant)
keeps_by_hook_inside = inside(KeepsByHook)
keeps_in_list_inside = inside(KeepsInList)


class NoisyScales(NoisyScale):
    """Draws a scale between two dropouts."""

    def between(self, x: Tensor) -> Tensor:
        x = torch.nn.functional.dropout(x, 0.3, self.training)
        return torch.nn.functional.dropout(super().between(x), 0.3, self.training)
