"""Buffers that forward passes read and update, norms, and parts that do not learn."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from benchmarks.exactness.odd.blocks import Head, Trunked, block, framed


class RunningMean(nn.Module):
    """A moving mean, updated in place under ``no_grad`` and subtracted."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.mean.mul_(0.9).add_(x.mean((0, 2, 3)).view(8, 1, 1), alpha=0.1)
        return x - self.mean


class DetachedMean(RunningMean):
    """The same without ``no_grad``."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean.mul_(0.9).add_(x.detach().mean((0, 2, 3)).view(8, 1, 1), alpha=0.1)
        return x - self.mean


class AssignedMean(RunningMean):
    """The same by assignment."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean((0, 2, 3)).view(8, 1, 1)
        return x - self.mean


class Counter(nn.Module):
    """Warms up by the number of its own calls."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * torch.clamp(self.calls / 10, max=1.0)


class FirstBatchNorm(nn.Module):
    """Scales by the deviation of the first batch that it sees (activation norm)."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.tensor(False))
        self.scale = nn.Parameter(torch.ones(8, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        if self.training and not self.seen:
            with torch.no_grad():
                self.scale.copy_(1 / (x.std((0, 2, 3)).view(8, 1, 1) + 1e-6))
                self.seen.fill_(True)
        return x * self.scale


class Queue(nn.Module):
    """A ring of past features, written by index, that attention looks back at."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("past", torch.randn(6, 8))
        self.register_buffer("at", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        features = x.mean((2, 3))
        looked = torch.softmax(features @ self.past.T.clone(), 1) @ self.past.clone()
        with torch.no_grad():
            places = (self.at + torch.arange(len(x))) % 6
            self.past[places] = features
            self.at.add_(len(x)).remainder_(6)
        return x + looked[:, :, None, None]


class Constants(nn.Module):
    """Buffers that nobody writes: a grid of coordinates, kept out of the state."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rows", torch.linspace(-1, 1, 16).view(1, 1, 16, 1), persistent=False)
        self.mix = nn.Conv2d(9, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(torch.cat([x, self.rows.expand(len(x), 1, 16, 16)], 1))


class ChannelsLastNorm(nn.Module):
    """Layer norm over channels, as ConvNeXt has it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class FrozenTrunk(Trunked):
    """The stem and a block do not learn; their batch norms still follow the data."""

    def __init__(self, classes: int) -> None:
        super().__init__(classes)
        self.stem.requires_grad_(False)
        self.first.requires_grad_(False)


class TrunkWithoutGradients(Trunked):
    """The same by ``no_grad`` around the trunk."""

    def forward(self, images: Tensor) -> Tensor:
        with torch.no_grad():
            x = self.first(self.stem(images))
        return self.head(self.second(x))


class TrunkInEvaluation(Trunked):
    """A trunk that stays in evaluation whatever the model does."""

    def train(self, mode: bool = True) -> TrunkInEvaluation:
        super().train(mode)
        self.stem.eval()
        self.first.eval()
        return self


class Detached(Trunked):
    """A second head learns on features that it does not change."""

    def __init__(self, classes: int) -> None:
        super().__init__(classes)
        self.probe = Head(8, classes)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        x = self.first(self.stem(images))
        return self.head(self.second(x)), self.probe(x.detach())


class Teacher(nn.Module):
    """A moving average of the model's own weights, updated with each forward pass, teaches it."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.student = Trunked(classes)
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        if self.training:
            with torch.no_grad():
                for mean, weight in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                    mean.lerp_(weight, 0.01)
        with torch.no_grad():
            taught = self.teacher(images)
        logits = self.student(images)
        return logits, logits - taught


running_mean = framed(RunningMean)
detached_mean = framed(DetachedMean)
assigned_mean = framed(AssignedMean)
counter = framed(Counter)
first_batch_norm = framed(FirstBatchNorm)
queue = framed(Queue)
constants = framed(Constants)
channels_last_norm = framed(ChannelsLastNorm)
group_norm = framed(lambda: nn.GroupNorm(2, 8))
instance_norm = framed(lambda: nn.InstanceNorm2d(8, affine=True))
tracking_instance_norm = framed(lambda: nn.InstanceNorm2d(8, track_running_stats=True))
cumulative_batch_norm = framed(lambda: nn.BatchNorm2d(8, momentum=None))


class Deep(nn.Sequential):
    """Thirty blocks: where sums in another order show."""

    def __init__(self, classes: int) -> None:
        super().__init__(block(3, 8, 2), *(block(8, 8) for _ in range(30)), Head(8, classes))


MODELS = (
    "running_mean", "detached_mean", "assigned_mean", "counter", "first_batch_norm", "queue", "constants",
    "channels_last_norm", "group_norm", "instance_norm", "tracking_instance_norm", "cumulative_batch_norm",
    "FrozenTrunk", "TrunkWithoutGradients", "TrunkInEvaluation", "Detached", "Teacher", "Deep",
)  # fmt: skip
"""Names of the factories."""
