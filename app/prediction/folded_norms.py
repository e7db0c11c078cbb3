"""Batch norms folded into the convolutions before them, for a model that only predicts.

Takes a module in evaluation mode; returns one that computes the same with fewer passes over its maps, or the module
itself where that cannot be had. In evaluation a batch norm is a scale and a shift of each channel, which the
convolution's weights take over (torch.fx does it; Jacob et al. 2018, section 3.2, has the arithmetic).
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor, nn
from torch.fx.experimental.optimization import fuse

log = logging.getLogger(__name__)

MOST_OFF = 1e-3
"""Of the largest output on the example: further from the module's own is no rounding, and the module is kept."""


@torch.inference_mode()
def with_folded_norms(module: nn.Module, example: Tensor) -> nn.Module:
    """Return ``module`` with its batch norms folded, or as it is where it cannot be followed or gives other values.

    Args:
        module: in evaluation mode.
        example: (1, 3, h, w), on the module's device.
    """
    if not any(isinstance(layer, nn.modules.batchnorm._BatchNorm) for layer in module.modules()):
        return module
    try:
        folded: nn.Module = fuse(module)
        expected, given = module(example), folded(example)
        off = float((given - expected).abs().max() / expected.abs().max().clamp(min=1e-6))
    except Exception as fault:  # whatever a user's own code raises when it is followed; it computes as it is
        log.info("batch norms stay layers of their own: %s: %s", type(fault).__name__, str(fault).partition("\n")[0])
        return module
    if not off <= MOST_OFF:
        log.info("batch norms stay layers of their own: folded, the model is %.2g off", off)
        return module
    return folded
