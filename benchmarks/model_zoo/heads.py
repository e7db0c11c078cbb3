"""torchvision's Inception v3 as it comes in training: with its auxiliary head, which makes it give two outputs.

Takes the number of classes; gives a module for images (n, 3, 299, 299) and larger, as
``--model package.module:factory`` asks. The registry's ``torchvision:inception_v3`` has no such head; GoogLeNet's two
are in ``benchmarks.exactness.models``.
"""

from __future__ import annotations

from torch import nn


def inception_v3(classes: int) -> nn.Module:
    """Outputs (n, classes) of head and auxiliary head in training, of the head in evaluation."""
    from torchvision.models import Inception3

    network: nn.Module = Inception3(num_classes=classes, aux_logits=True, init_weights=True)
    return network
