"""Networks of torchvision as they come in training: with the auxiliary head, which makes them give two outputs.

Each takes the number of classes, as ``--model package.module:factory`` asks. The registry's ``torchvision:NAME`` have
no such head; GoogLeNet's two are in ``benchmarks.exactness.models``.
"""

from __future__ import annotations

from torch import nn


def inception_v3(classes: int) -> nn.Module:
    """Inception v3 for 299 px and larger: outputs (n, classes) of both heads in training, of the main one otherwise."""
    from torchvision.models import Inception3

    network: nn.Module = Inception3(num_classes=classes, aux_logits=True, init_weights=True)
    return network


def fcn_resnet50(classes: int) -> nn.Module:
    """FCN: an ordered dict of the logits (n, classes, h, w) of its two heads."""
    from torchvision.models.segmentation import fcn_resnet50

    network: nn.Module = fcn_resnet50(weights=None, weights_backbone=None, num_classes=classes, aux_loss=True)
    return network
