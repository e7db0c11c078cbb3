"""Models whose forward updates buffers in training, each in its way; factories as a user gives them to ``--model``."""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Averaging(nn.Module):
    """Scales by a running mean, updated in place."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("ema", torch.ones(4))
        self.conv = nn.Conv2d(4, 4, 1)

    def scaled(self, x: Tensor) -> Tensor:
        return self.conv(x) * self.ema.view(1, -1, 1, 1).clone()

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.ema.mul_(0.9).add_(x.detach().mean((0, 2, 3)), alpha=0.1)
        return self.scaled(x)


class Keeping(Averaging):
    """Autograd keeps the buffer itself, which the next microbatch changes."""

    def scaled(self, x: Tensor) -> Tensor:
        return self.conv(x) * self.ema.view(1, -1, 1, 1)


class Codebook(Averaging):
    """Its average is a parameter that takes no gradient, as of vector quantizers."""

    def __init__(self) -> None:
        super().__init__()
        del self.ema
        self.ema = nn.Parameter(torch.ones(4), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        scaled = self.scaled(x)
        if self.training:
            self.ema.data.mul_(0.9).add_(x.detach().mean((0, 2, 3)), alpha=0.1)
        return scaled


class WithoutGradient(Averaging):
    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.ema.mul_(0.9).add_(x.mean((0, 2, 3)), alpha=0.1)
        return self.scaled(x)


class Assigning(Averaging):
    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.ema = 0.9 * self.ema + 0.1 * x.detach().mean((0, 2, 3))
        return self.scaled(x)


class Looking(Averaging):
    """What it updates depends on the data."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training and x.mean() < 10:
            self.ema.mul_(0.9).add_(x.detach().mean((0, 2, 3)), alpha=0.1)
        return self.scaled(x)


class Caching(Averaging):
    """Sets a buffer once for tiles of one size, whatever is on them."""

    def forward(self, x: Tensor) -> Tensor:
        if self.ema.shape != (1, 1, *x.shape[2:]):
            self.ema = torch.linspace(0, 1, x.shape[3], dtype=x.dtype, device=x.device).expand(1, 1, *x.shape[2:])
        return self.conv(x) * self.ema


class AtTheRoot(nn.Module):
    def __init__(self, assigns: bool) -> None:
        super().__init__()
        self.assigns = assigns
        self.before, self.after, self.head = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3), nn.Linear(4, 3)
        self.register_buffer("ema", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.before(x))
        if self.training:
            mean = 0.9 * self.ema + 0.1 * x.detach().mean((0, 2, 3))
            if self.assigns:
                self.ema = mean
            else:
                self.ema.copy_(mean)
        x = torch.tanh(self.after(x * self.ema.view(1, -1, 1, 1)))
        logits: Tensor = self.head(x.mean((2, 3)))
        return logits


def around(middle: nn.Module) -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(3, 4, 3, padding=1), nn.Tanh(), middle, nn.Tanh(), nn.Conv2d(4, 4, 3, padding=1)),
        *(nn.Tanh(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)),
    )


def averaging(classes: int) -> nn.Module:
    return around(Averaging())


def keeping(classes: int) -> nn.Module:
    return around(Keeping())


def codebook(classes: int) -> nn.Module:
    return around(Codebook())


def without_gradient(classes: int) -> nn.Module:
    return around(WithoutGradient())


def assigning(classes: int) -> nn.Module:
    return around(Assigning())


def looking(classes: int) -> nn.Module:
    return around(Looking())


def caching(classes: int) -> nn.Module:
    return around(Caching())


def spectral(classes: int) -> nn.Module:
    return around(nn.utils.parametrizations.spectral_norm(nn.Conv2d(4, 4, 3, padding=1)))


def old_spectral(classes: int) -> nn.Module:
    return around(nn.utils.spectral_norm(nn.Conv2d(4, 4, 3, padding=1)))


def at_the_root(classes: int) -> nn.Module:
    return AtTheRoot(assigns=False)


def assigning_at_the_root(classes: int) -> nn.Module:
    return AtTheRoot(assigns=True)


class Checkpointed(nn.Module):
    """Torch computes its norm again in the backward pass, and updates it twice."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4))
        self._again = functools.partial(checkpoint, use_reentrant=reentrant)

    def forward(self, x: Tensor) -> Tensor:
        return self._again(self.inner, x)


def checkpointed(classes: int) -> nn.Module:
    return around(Checkpointed(reentrant=False))


def checkpointed_reentrant(classes: int) -> nn.Module:
    return around(Checkpointed(reentrant=True))
