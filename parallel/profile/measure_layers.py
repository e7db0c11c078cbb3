"""Costs of the layers of a model, measured on the device one after the other.

Takes what ``trace`` gave and the shape of a microbatch; gives ``Costs``. At most one layer's memory for training is
needed besides the values still to be used, so that models can be measured whose training does not fit.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import numpy as np
import torch

from parallel.cost.layer_cost import Costs, LayerCost
from parallel.profile.layer_timing import Runs, time_layers
from parallel.trace.trace import Traced


def measure(
    traced: Traced,
    shape: tuple[int, ...],
    device: torch.device,
    *,
    dtype: torch.dtype = torch.float32,
    channels_last: bool = True,
    repeats: int = 3,
) -> Costs:
    """Return the seconds of every layer. Weights, buffers and random state stay as they are.

    Args:
        traced: a model whose weights are on ``device``, in the memory layout of training.
        shape: (n, c, h, w) of a microbatch.
        channels_last: memory layout of images.
        repeats: runs of each pass that count; their median is taken.

    Raises:
        ValueError: the weights have no values.
    """
    if any(parameter.is_meta for parameter in traced.model.parameters()):
        raise ValueError(
            "only layers that have weights can be measured; got a model on the meta device. Build it on "
            f"{device}, or estimate its layers from a calibration"
        )
    images = torch.rand(shape, device=device, generator=torch.Generator(device).manual_seed(0)).to(dtype)
    if channels_last and len(shape) == 4:
        images = images.contiguous(memory_format=torch.channels_last)
    readings = time_layers(traced, images, repeats)
    layers = tuple(LayerCost(*map(statistics.median, runs)) for runs in readings)
    return Costs(layers, f"measured at {_side(shape)}", _spread(readings))


def _spread(readings: Sequence[Runs]) -> float | None:
    """Return how far the middle run of a layer is from its fastest, in the middle over the layers."""
    sums = [[sum(run) for run in zip(runs.forward, runs.backward, strict=True)] for runs in readings]
    spreads = [float(np.median(runs)) / min(runs) - 1 for runs in sums if min(runs) > 0]
    return float(np.median(spreads)) if spreads else None


def _side(shape: tuple[int, ...]) -> str:
    height, width = shape[2:] if len(shape) == 4 else (0, shape[-1])
    return f"{width} px" if height in (0, width) else f"{height} x {width} px"
