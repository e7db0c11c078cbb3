"""Small models with what makes splitting hard: skips, dropout in several places, in-place changes, several outputs,
complex values."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Pair(NamedTuple):
    left: Tensor
    right: Any


class SkipNet(nn.Module):
    """A U-Net in small: two long skips, dropout early and late, running statistics; logits (n, 3, h, w)."""

    def __init__(self, momentum: float | None = 0.1) -> None:
        super().__init__()
        self.down1 = nn.Sequential(
            nn.Conv2d(3, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6, momentum=momentum), nn.ReLU(inplace=True)
        )
        self.drop = nn.Dropout2d(0.3)
        self.down2 = nn.Sequential(
            nn.Conv2d(6, 8, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(8, momentum=momentum), nn.ReLU()
        )
        self.bottom = nn.Sequential(nn.Conv2d(8, 8, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(8), nn.GELU())
        self.up2 = nn.Conv2d(16, 8, 3, padding=1)
        self.up1 = nn.Conv2d(14, 6, 3, padding=1)
        self.late = nn.Dropout(0.2)
        self.head = nn.Conv2d(6, 3, 1)

    def forward(self, images: Tensor) -> Tensor:
        first = self.down1(images)
        second = self.down2(self.drop(first))
        bottom = self.bottom(second)
        up = F.interpolate(bottom, size=second.shape[2:], mode="nearest")
        up = torch.relu(self.up2(torch.cat([up, second], 1)))
        up = F.interpolate(up, scale_factor=2.0, mode="nearest")
        up = torch.relu(self.up1(torch.cat([up, first], 1)))
        logits: Tensor = self.head(self.late(up))
        return logits


class TwoOutputs(nn.Module):
    """A classifier with an early second head, and a parameter that the loss never reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6), nn.ReLU(inplace=True))
        self.early = nn.Linear(6, 3)
        self.body = nn.Sequential(nn.Conv2d(6, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
        self.more = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
        self.late = nn.Linear(8, 3)
        self.unused = nn.Linear(4, 4)

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        stem = self.stem(images)
        early = self.early(stem.mean((2, 3)))
        return {"out": self.late(self.more(self.body(stem)).mean((2, 3))), "aux": early}


class FourierNet(nn.Module):
    """A Fourier neural operator in small: what lies between its transforms is complex, one weight is, one is not."""

    def __init__(self) -> None:
        super().__init__()
        self.lift = nn.Conv2d(3, 4, 1, bias=False)
        self.weight = nn.Parameter(torch.randn(4, 4, dtype=torch.complex64))
        self.norm = nn.BatchNorm2d(4)
        self.pairs = nn.Parameter(torch.randn(4, 1, 1, 2))
        self.drop = nn.Dropout(0.2)
        self.mix, self.head = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 3, 1)

    def forward(self, images: Tensor) -> Tensor:
        lifted = torch.relu(self.norm(self.lift(images)))
        spectrum = torch.fft.rfft2(lifted)
        mixed = torch.einsum("nchw,cd->ndhw", spectrum, self.weight.to(spectrum.dtype))
        scaled = mixed * torch.view_as_complex(self.pairs) + spectrum
        field = torch.fft.irfft2(scaled, s=images.shape[2:])
        logits: Tensor = self.head(self.drop(torch.tanh(self.mix(field))) + lifted)
        return logits


class Made(nn.Module):
    """Parts by name, and what they compute of the input: ``compute(module, x)``."""

    def __init__(self, compute: Callable[[Any, Tensor], Any], **parts: Any) -> None:
        super().__init__()
        self.compute = compute
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: Tensor) -> Any:
        return self.compute(self, x)


def pixel_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits, targets)


def two_losses(outputs: Any, targets: Tensor) -> Tensor:
    labels = targets[:, 0, 0]
    return F.cross_entropy(outputs["out"], labels) + 0.4 * F.cross_entropy(outputs["aux"], labels)


_DRAWING = threading.Lock()
_DRAWN: dict[Hashable, nn.Module] = {}


def drawn_once(key: Hashable, seed: int, make: Callable[[], nn.Module]) -> nn.Module:
    """A copy of what ``make`` gave when ``key`` was first asked for, drawn from ``seed``.

    Ranks may be threads of one process, which share its generator: two that drew at a time would get other weights.
    """
    with _DRAWING:
        if key not in _DRAWN:
            torch.manual_seed(seed)
            _DRAWN[key] = make()
        return copy.deepcopy(_DRAWN[key])


NETS = {"skips": (SkipNet, pixel_loss), "two-outputs": (TwoOutputs, two_losses)}
ALL_NETS = {**NETS, "fourier": (FourierNet, pixel_loss)}


def batch_of(sizes: list[int], px: int, seed: int, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    """Random images (n, 3, px, px) and pixel classes (n, px, px) of one global batch."""
    generator = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randn(n, 3, px, px, generator=generator, dtype=dtype),
            torch.randint(0, 3, (n, px, px), generator=generator),
        )
        for n in sizes
    ]
