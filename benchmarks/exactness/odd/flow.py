"""Control flow, hooks and contexts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torchvision.ops import StochasticDepth

from benchmarks.exactness.odd.blocks import Framed, Head, Trunked, block, framed


class EarlyReturn(Trunked):
    """Tiny images skip the trunk."""

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images)
        if x.shape[-1] < 8:
            return self.head(x)
        return self.head(self.second(self.first(x)))


class AssertsShape(Trunked):
    def forward(self, images: Tensor) -> Tensor:
        assert images.shape[1] == 3, "RGB"
        if images.shape[2] % 4 or images.shape[3] % 4:
            raise ValueError(f"sides must be multiples of 4; got {tuple(images.shape)}")
        return super().forward(images)


class AssertsValue(Trunked):
    def forward(self, images: Tensor) -> Tensor:
        x = self.first(self.stem(images))
        assert torch.isfinite(x).all(), "not finite"
        return self.head(self.second(x))


class PadsToMultiple(Trunked):
    """Pads to a multiple of 12 and crops again."""

    def forward(self, images: Tensor) -> Tensor:
        height, width = images.shape[-2:]
        x = F.pad(images, (0, -width % 12, 0, -height % 12))
        x = F.interpolate(self.second(self.first(self.stem(x))), scale_factor=2.0)
        return self.head(x[..., :height, :width])


class BranchesOnData(Trunked):
    """Bright images go another way, in the model's own forward."""

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images)
        x = self.first(x) if x.mean() > 0 else self.second(x)
        return self.head(x)


class BranchInside(nn.Module):
    """The same in a submodule."""

    def __init__(self) -> None:
        super().__init__()
        self.bright, self.dark = nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.bright(x) if x.mean() > 0.4 else self.dark(x)


class AsksForTensor(nn.Module):
    """Takes a tensor or a list of them, and may get a skip."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Conv2d(8, 8, 1)

    def forward(self, x: Any, skip: Tensor | None = None) -> Tensor:
        x = self.mix(x) if isinstance(x, torch.Tensor) else torch.stack(list(x)).sum(0)
        return torch.tanh(x) + skip if torch.is_tensor(skip) else x * 0.5


class AsksAtRoot(Trunked):
    def __init__(self, classes: int) -> None:
        super().__init__(classes)
        self.join = AsksForTensor()

    def forward(self, images: Tensor) -> Tensor:
        images = images if isinstance(images, Tensor) else images["image"]
        x = self.stem(images)
        return self.head(self.second(self.join(self.join([self.first(x), x]), x)))


class Checkpointed(Trunked):
    """Computes a block again for its backward pass, by torch's own checkpoint."""

    reentrant = False

    def forward(self, images: Tensor) -> Tensor:
        x = checkpoint(self.first, self.stem(images), use_reentrant=self.reentrant)
        return self.head(checkpoint(self.second, x, use_reentrant=self.reentrant))


class CheckpointedReentrant(Checkpointed):
    reentrant = True


class DropsBlocks(Trunked):
    """Leaves out a block for some tiles."""

    def __init__(self, classes: int) -> None:
        super().__init__(classes)
        self.drop = StochasticDepth(0.4, "row")

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images)
        x = x + self.drop(self.first(x))
        return self.head(x + self.drop(self.second(x)))


class TossesCoins(nn.Module):
    """Leaves out the block for the whole batch, by a number drawn in Python's own control flow."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Conv2d(8, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        if self.training and torch.rand(()) < 0.5:
            return x
        return x + self.inner(x)


class Doubled(torch.autograd.Function):
    """Forward x, backward 2 x the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * gradient


class FunctionAtRoot(Trunked):
    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.second(Doubled.apply(self.first(self.stem(images)))))


class FunctionInside(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return Doubled.apply(x)


class Autocast(Trunked):
    """A block under autocast, another that autocast leaves alone."""

    def forward(self, images: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            x = self.first(self.stem(images))
        with torch.autocast("cpu", enabled=False):
            return self.head(self.second(x))


class HooksOfTensors(Trunked):
    """A hook on a value halves its gradient."""

    def forward(self, images: Tensor) -> Tensor:
        x = self.first(self.stem(images))
        if x.requires_grad:
            x.register_hook(lambda gradient: gradient * 0.5)
        return self.head(self.second(x))


class DeepSupervision(Trunked):
    """Another output in training only."""

    def __init__(self, classes: int) -> None:
        super().__init__(classes)
        self.early = Head(8, classes)

    def forward(self, images: Tensor) -> Any:
        x = self.first(self.stem(images))
        logits = self.head(self.second(x))
        return [logits, self.early(x)] if self.training else logits


class Routed(nn.Module):
    """Blocks by name, called in an order that is a list of strings."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict({"a": block(3, 8, 2), "b": block(8, 8), "c": block(8, 8)})
        self.order, self.head = ["a", "b", "c", "b"], Head(8, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = images
        for name in self.order:
            x = self.blocks[name](x)
        return self.head(x)


class CallsItems(Trunked):
    """Scales by a number taken out of a tensor."""

    def forward(self, images: Tensor) -> Tensor:
        x = self.first(self.stem(images))
        return self.head(self.second(x / max(x.detach().abs().max().item(), 1e-3)))


branch_inside = framed(BranchInside)
tosses_coins = framed(TossesCoins)
function_inside = framed(FunctionInside)


def forward_hooks(classes: int) -> nn.Module:
    """Hooks scale the input of a block and shift its output."""
    model = Framed(block(8, 8), classes)
    model[1].register_forward_pre_hook(lambda _, inputs: (inputs[0] * 1.5,))
    model[2].register_forward_hook(lambda _, inputs, output: output + 0.1)
    return model


def backward_hooks(classes: int) -> nn.Module:
    """The gradient that leaves a block is halved."""
    model = Framed(block(8, 8), classes)
    model[1].register_full_backward_hook(lambda _, into, out: (into[0] * 0.5,))
    return model


def parameter_hooks(classes: int) -> nn.Module:
    """Gradients of one weight are clipped as they come."""
    model = Framed(nn.Conv2d(8, 8, 1), classes)
    model[1].weight.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
    return model


MODELS = (
    "EarlyReturn", "AssertsShape", "AssertsValue", "PadsToMultiple", "BranchesOnData", "branch_inside", "AsksAtRoot",
    "Checkpointed", "CheckpointedReentrant", "DropsBlocks", "tosses_coins", "FunctionAtRoot", "function_inside",
    "Autocast", "HooksOfTensors", "DeepSupervision", "Routed", "CallsItems", "forward_hooks", "backward_hooks",
    "parameter_hooks",
)  # fmt: skip
"""Names of the factories."""
