"""Check whether a model takes images in channels_last, the layout in which convolutions are fastest.

Takes a model and the shape of a microbatch; returns an answer without memory or time. Code that takes images apart by
``view`` expects the channels to lie one after the other, and torch refuses anything else.
"""

from __future__ import annotations

import torch
from torch import nn

from parallel.trace.without_data import run_without_data

LEFT_OUT = (
    "channels_last is left out: the model takes its images apart in a way that this layout does not allow (view "
    "after a convolution, say); reshape in place of view would make it faster"
)


def takes_channels_last(model: nn.Module, shape: tuple[int, ...]) -> bool:
    """Return False where ``model`` runs on images that lie channel by channel, and not on channels_last ones.

    Args:
        shape: (n, c, h, w) of a microbatch.
    """
    return _runs(model, shape, torch.channels_last) or not _runs(model, shape, torch.contiguous_format)


def _runs(model: nn.Module, shape: tuple[int, ...], layout: torch.memory_format) -> bool:
    try:
        run_without_data(model, shape, layout)
    except Exception:  # whatever torch raises for a layout, and what a model that looks at its data does
        return False
    return True
