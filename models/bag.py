"""Attention over the tiles of a slide: gated attention-based multiple instance learning, trained with its encoder.

Ilse, Tomczak, Welling 2018, "Attention-based deep multiple instance learning", eq. 7 to 9: the features h_k of the
tiles of a bag are averaged with weights a_k = softmax_k(w . (tanh(V h_k) * sigmoid(U h_k))), and a linear classifier
takes the average. The weights add up to 1, so the classifier of the average is the average of the classifier of each
tile. A model therefore gives C logits and one score for every tile; the bag has no parameters of its own.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from models.losses import TileClassLoss

HIDDEN = 128
"""Length of the vectors that a score is made of (Ilse et al. 2018, section 4.2)."""


class GatedClassifier(nn.Module):
    """Logits and attention score of each tile: features (n, F) -> (n, C + 1)."""

    def __init__(self, classifier: nn.Linear) -> None:
        super().__init__()
        self.classifier = classifier
        self.value = nn.Linear(classifier.in_features, HIDDEN)
        self.gate = nn.Linear(classifier.in_features, HIDDEN)
        self.score = nn.Linear(HIDDEN, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (n, C) and, as the last column, scores."""
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


def has_bag_head(names: Iterable[str]) -> bool:
    """Return whether tensors of these ``names`` include those of a ``GatedClassifier``."""
    known, end = set(names), ".score.weight"
    heads = {name.removesuffix(end) for name in known if name.endswith(end)}
    return any(all(f"{head}.{part}.weight" in known for part in ("classifier", "value", "gate")) for head in heads)


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
