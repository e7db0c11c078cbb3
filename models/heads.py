"""Pooling heads: what makes one row of numbers of the last map of a classifier, in the place of its average pooling.

Takes a model with one global average pool; gives it gated attention over the positions of its last map (Ilse, Tomczak,
Welling 2018, "Attention-based deep multiple instance learning", eq. 9), or the generalised mean (Radenovic, Tolias,
Chum 2018, "Fine-tuning CNN image retrieval with no human annotation", eq. 3). Both are sums over positions, so that a
tile that is computed box by box needs no look at its whole map: softmax usually needs the largest score first, and
here a bound of it that is known in advance stands in its place.

``GatedClassifier`` attends over the tiles of a slide (a bag), and is trained with its encoder (eq. 7 to 9 of Ilse et
al.): the features h_k of tiles are averaged with weights a_k = softmax_k(w . (tanh(V h_k) * sigmoid(U h_k))), and a
linear classifier takes the average. The weights add up to 1, so the classifier of the average is the average of the
classifier of each tile. A model therefore gives C logits and one score for every tile; the bag has no parameters.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from models.losses import TileClassLoss

Head = Literal["average", "gem", "attention"]

HIDDEN = 128
"""Numbers that a score is made of (Ilse et al. 2018, table of section 4.2)."""

LARGEST_BOUND = 350.0
"""Of scores: exp(-2 x 350) is the least that float64 holds with all its digits."""

GEM_POWER, GEM_LEAST = 3.0, 1e-6
"""Exponent at the start, and least value of a px, as in the paper's code."""

PROBE_PX = 224
"""Side of the tile that tells how many channels the last map has, for models that do not say what they take."""


class AttentionPool(nn.Module):
    """The mean over positions, weighted by gated attention: (n, c, h, w) -> (n, c, 1, 1).

    A score is w . (tanh(V x) * sigmoid(U x)), so its size is at most b = sum |w|. Weights are exp(score - b) over their
    sum, in float64. Where b is above 350 they could lose digits: the result is then not a number, and so is the loss.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.value = nn.Conv2d(channels, HIDDEN, 1, bias=False)
        self.gate = nn.Conv2d(channels, HIDDEN, 1, bias=False)
        self.score = nn.Conv2d(HIDDEN, 1, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.score(torch.tanh(self.value(x)) * torch.sigmoid(self.gate(x)))
        bound = self.score.weight.abs().sum().to(torch.float64)
        bound = bound / bound.le(LARGEST_BOUND)  # by 0 beyond it: all weights are 0 then, and 0 / 0 is no number
        weights = torch.exp(scores.to(torch.float64) - bound)
        pooled = (x * weights).sum((2, 3), keepdim=True) / weights.sum((2, 3), keepdim=True)
        return pooled.to(self.score.weight.dtype)


class GeneralisedMean(nn.Module):
    """(mean over positions of x^p)^(1/p), p trained: (n, c, h, w) -> (n, c, 1, 1). 1 is the average, and much the
    largest value."""

    def __init__(self) -> None:
        super().__init__()
        self.power = nn.Parameter(torch.full((1,), GEM_POWER))

    def forward(self, x: Tensor) -> Tensor:
        return x.clamp(min=GEM_LEAST).pow(self.power).mean((2, 3), keepdim=True).pow(1.0 / self.power)


class PoolHead(nn.Module):
    """A head for maps and results of the form that timm's pools take and give.

    Args:
        channels_last: it takes (n, h, w, c), and gives (n, 1, 1, c) unless it flattens.
        flatten: it gives (n, c).
    """

    def __init__(self, pool: nn.Module, *, channels_last: bool, flatten: bool) -> None:
        super().__init__()
        self.pool = pool
        self.channels_last, self.flatten = channels_last, flatten

    def forward(self, x: Tensor) -> Tensor:
        pooled: Tensor = self.pool(x.permute(0, 3, 1, 2) if self.channels_last else x)
        if self.flatten:
            return torch.flatten(pooled, 1)
        return pooled.permute(0, 2, 3, 1) if self.channels_last else pooled


def replace_pool(model: nn.Module, name: str, head: Head, side: int | None) -> None:
    """Put ``head`` in the place of the global average pooling of ``model``, in place.

    Args:
        side: of the tiles, px; None: one that the model takes.

    Raises:
        ValueError: the model does not end in one global average pool of a map, or cannot be asked for its channels.
    """
    if head == "average":
        return
    path = pool_path(model)
    if path is None:
        raise ValueError(
            f"--head {head} cannot be had for model {name}: it has no layer of its own that averages the last map over "
            "all positions; use --head average to keep it as it is, or a ResNet, most of torchvision's classifiers, or "
            "a timm: model whose global_pool is a layer"
        )
    old: Any = model.get_submodule(path)
    channels_last = flatten = False
    if not isinstance(old, nn.AdaptiveAvgPool2d):  # timm's
        channels_last = getattr(old.pool, "dim", (2, 3)) == (1, 2)
        flatten = isinstance(old.flatten, nn.Flatten) or bool(getattr(old.pool, "flatten", False))
    channels = _channels(model, name, head, path, channels_last, side)
    pool = AttentionPool(channels) if head == "attention" else GeneralisedMean()
    model.set_submodule(path, PoolHead(pool, channels_last=channels_last, flatten=flatten))


def pool_path(model: nn.Module) -> str | None:
    """Return where the one global pool of ``model`` is, whichever head it has; None where there is none, or several."""
    top = dict(model.named_children())
    paths = [
        path
        for path, part in model.named_modules()
        if isinstance(part, PoolHead)
        # timm's global pool, set to the average, without loading timm
        or (type(part).__name__ == "SelectAdaptivePool2d" and part.pool_type in ("avg", "fast", "fastavg"))
        or (path in top and isinstance(part, nn.AdaptiveAvgPool2d) and part.output_size in (1, (1, 1)))
    ]
    outer = [path for path in paths if not any(path.startswith(f"{other}.") for other in paths)]
    return outer[0] if len(outer) == 1 else None


def _channels(model: nn.Module, name: str, head: Head, path: str, channels_last: bool, side: int | None) -> int:
    """Return the channels of the pooled map, from a copy without data."""
    shapes: list[torch.Size] = []
    without_data = copy.deepcopy(model).to("meta").eval()
    without_data.get_submodule(path).register_forward_pre_hook(lambda _, given: shapes.append(given[0].shape))
    side = side or getattr(model, "pretrained_cfg", {}).get("input_size", (3, PROBE_PX, PROBE_PX))[-1]
    try:
        with torch.no_grad():
            without_data(torch.empty(1, 3, side, side, device="meta"))
        (shape,) = shapes
        return shape[3 if channels_last else 1]
    except Exception as fault:  # any code of a model that is not ours
        raise ValueError(
            f"--head {head} cannot be had for model {name}: how many channels its last map has cannot be found out "
            f"without data on {side} x {side} px ({type(fault).__name__}: {fault}); use another --tile, or --head "
            "average"
        ) from fault


class GatedClassifier(nn.Module):
    """Logits and, last, the attention score of each tile: features (n, F) -> (n, C + 1)."""

    def __init__(self, classifier: nn.Linear) -> None:
        super().__init__()
        self.classifier = classifier
        self.value = nn.Linear(classifier.in_features, HIDDEN)
        self.gate = nn.Linear(classifier.in_features, HIDDEN)
        self.score = nn.Linear(HIDDEN, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.score(torch.tanh(self.value(x)) * torch.sigmoid(self.gate(x)))
        return torch.cat((self.classifier(x), scores), 1)


def put_bag_head(model: nn.Module, name: str, classes: int) -> None:
    """Append attention scores to the logits of ``model``, in place.

    Raises:
        ValueError: the model does not end in a linear layer that gives ``classes`` logits.
    """
    layers = [(path, part) for path, part in model.named_modules() if isinstance(part, nn.Linear)]
    if not layers or layers[-1][1].out_features != classes:
        raise ValueError(
            f"--bag cannot be had for model {name}: its last layer is no linear layer with one output for each of the "
            f"{classes} classes; choose a classifier that ends in one, such as resnet50 or timm:convnext_tiny"
        )
    path, classifier = layers[-1]
    model.set_submodule(path, GatedClassifier(classifier))


def bag_head_path(names: Iterable[str]) -> str | None:
    """Return the path of the ``GatedClassifier`` whose tensors are among ``names``; None where there is none."""
    known, end = set(names), ".score.weight"
    heads = {name.removesuffix(end) for name in known if name.endswith(end)}
    parts = ("classifier", "value", "gate")
    return next((head for head in heads if all(f"{head}.{part}.weight" in known for part in parts)), None)


def bag_logits(outputs: Tensor) -> Tensor:
    """Return the logits (b, C) of bags from the outputs (b, N, C + 1) of their tiles."""
    attention = outputs[..., -1:].softmax(1)
    return (attention * outputs[..., :-1]).sum(1)


class BagLoss(TileClassLoss):
    """The loss of one label per bag; see ``ClassLoss``."""

    def forward(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Return the mean loss () of ``outputs`` (b, N, C + 1) of bags with ``labels`` int64 (b,)."""
        return self.of_items(bag_logits(outputs), labels).mean()


class BagGradient(nn.Module):
    """The loss whose gradient by the outputs of each tile is given: mean over tiles of output . gradient."""

    def forward(self, outputs: Tensor, gradients: Tensor) -> Tensor:
        """Return () of ``outputs`` and ``gradients`` (n, C + 1)."""
        return (outputs * gradients.to(outputs.dtype)).sum(1).mean()
