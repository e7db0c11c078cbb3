"""Models whose forward updates buffers in training, each in its way; factories as a user gives them to ``--model``."""

from __future__ import annotations

import functools
from collections.abc import Callable

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
            row = torch.linspace(0, 1, x.shape[3], dtype=x.dtype, device=x.device)
            self.ema = row.repeat(1, 1, x.shape[2], 1)
        return self.conv(x) * self.ema


class Counting(Averaging):
    """Corrects the running mean by a counter of microbatches."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.steps.add_(1)
            torch.mul(self.ema, 0.9, out=self.ema)
            torch._foreach_add_([self.ema], [x.detach().mean((0, 2, 3))], alpha=0.1)
        return self.scaled(x / (1 - 0.9 ** self.steps.clamp(min=1)))


class SettingData(Averaging):
    """Another tensor takes the memory of the buffer."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.ema.data = 0.9 * self.ema.data + 0.1 * x.detach().mean((0, 2, 3))
        return self.scaled(x)


class SettingWeights(nn.Module):
    """Takes a trained scale from the first microbatch, or moves it towards each."""

    def __init__(self, each: bool) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.register_buffer("is_set", torch.zeros((), dtype=torch.long))
        self.each = each

    def forward(self, x: Tensor) -> Tensor:
        if self.training and (self.each or not self.is_set):
            self.scale.data.mul_(0.9).add_(x.detach().mean((0, 2, 3)), alpha=0.1)
            self.is_set.fill_(1)
        return x * self.scale.view(1, -1, 1, 1)


class PlainTensor(nn.Module):
    """Its running mean is an attribute, and no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.ema = torch.ones(4)
        self.conv = nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.ema = 0.9 * self.ema.to(x) + 0.1 * x.detach().mean((0, 2, 3))
        return self.conv(x) * self.ema.to(x).view(1, -1, 1, 1)


class PlainCounter(nn.Module):
    """Counts microbatches in Python, and computes with the count."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = 0
        self.conv = nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.steps += 1
        return self.conv(x) * (1 + 0.5**self.steps)


class Remembering(nn.Module):
    """Keeps what it gave for whoever asks after the pass; the next pass does not look at it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 1)
        self.last: Tensor | None = None
        self.sides: tuple[int, ...] = ()

    def forward(self, x: Tensor) -> Tensor:
        self.last, self.sides = self.conv(x), tuple(x.shape[2:])
        return self.last


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


def around(middle: Callable[[], nn.Module]) -> Callable[[int], nn.Module]:
    """Return a factory of a classifier with ``middle`` between its convolutions."""

    def make(classes: int) -> nn.Module:
        return nn.Sequential(
            *(nn.Conv2d(3, 4, 3, padding=1), nn.Tanh(), middle(), nn.Tanh(), nn.Conv2d(4, 4, 3, padding=1)),
            *(nn.Tanh(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)),
        )

    return make


averaging, keeping, codebook, assigning = map(around, (Averaging, Keeping, Codebook, Assigning))
looking, caching, counting, setting_data = map(around, (Looking, Caching, Counting, SettingData))
plain_tensor, plain_counter, remembering = map(around, (PlainTensor, PlainCounter, Remembering))
scaling_weights, setting_weights = (around(functools.partial(SettingWeights, each)) for each in (True, False))
checkpointed, checkpointed_reentrant = (around(functools.partial(Checkpointed, each)) for each in (False, True))
