"""Blocks of the odd models."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn


def block(channels: int, out: int, stride: int = 1) -> nn.Sequential:
    """Convolution, batch norm, activation."""
    convolution = nn.Conv2d(channels, out, 3, stride=stride, padding=1, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(out), nn.ReLU())


class Head(nn.Sequential):
    """Features (n, channels, h, w) -> logits (n, classes)."""

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))


class Framed(nn.Sequential):
    """A stem, the odd part (n, 8, 16, 16) -> (n, 8, h, w), a body and a head."""

    def __init__(self, odd: nn.Module, classes: int) -> None:
        super().__init__(block(3, 8, 2), odd, block(8, 8), block(8, 8, 2), Head(8, classes))


def framed(make: Callable[[], nn.Module]) -> Callable[[int], Framed]:
    """Return the factory of a model whose odd part is what ``make`` gives."""
    return lambda classes: Framed(make(), classes)


class Trunked(nn.Module):
    """Stem, two blocks and head as attributes, for a ``forward`` of one's own."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.stem, self.first, self.second = block(3, 8, 2), block(8, 8), block(8, 8)
        self.head = Head(8, classes)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.second(self.first(self.stem(images))))
        return logits
