"""Costs of the layers of a model, measured on the device one after the other.

Takes what ``trace`` gave and the shape of a microbatch; gives ``Costs``. At most one layer's memory for training is
needed besides the values still to be used, so that models can be measured whose training does not fit. Where even that
is too much, two smaller tiles are measured, and the time of each layer is extrapolated in a straight line over the px.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import numpy as np
import torch

from parallel.cost.layer_cost import Costs, LayerCost
from parallel.profile.layer_timing import Runs, time_layers
from parallel.trace.trace import Traced

MULTIPLE = 32
"""Scaled tiles have sides that nets can halve five times."""
SECOND = 0.5
"""Side of the second tile, in that of the first."""


def measure(
    traced: Traced,
    shape: tuple[int, ...],
    device: torch.device,
    *,
    scale: float = 1.0,
    dtype: torch.dtype = torch.float32,
    channels_last: bool = True,
    repeats: int = 3,
) -> Costs:
    """Return the seconds of every layer. Weights, buffers and random state stay as they are.

    Args:
        traced: a model whose weights are on ``device``, in the memory layout of training.
        shape: (n, c, h, w) of a microbatch.
        scale: side of the tile that is measured, in that of the real one; over 0, at most 1.
        channels_last: memory layout of images.
        repeats: runs of each pass that count; their median is taken.

    Raises:
        ValueError: the weights have no values, or ``scale`` is out of range.
    """
    if any(parameter.is_meta for parameter in traced.model.parameters()):
        raise ValueError(
            "only layers that have weights can be measured; got a model on the meta device. Build it on "
            f"{device}, or estimate its layers from a calibration"
        )
    if not 0 < scale <= 1:
        raise ValueError(f"scale is the measured side over the real one, over 0 and at most 1; got {scale}")

    def read(size: tuple[int, ...]) -> list[Runs]:
        images = torch.rand(size, device=device, generator=torch.Generator(device).manual_seed(0)).to(dtype)
        if channels_last and len(size) == 4:
            images = images.contiguous(memory_format=torch.channels_last)
        return time_layers(traced, images, repeats)

    if scale == 1:
        readings = read(shape)
        layers = tuple(LayerCost(*map(statistics.median, runs)) for runs in readings)
        return Costs(layers, f"measured at {_side(shape)}", _spread(readings))
    sizes = [_scaled(shape, scale * SECOND), _scaled(shape, scale)]
    small, large = ([tuple(map(statistics.median, runs)) for runs in read(size)] for size in sizes)
    px = [float(math.prod(size[2:])) for size in (*sizes, shape)]
    layers = tuple(
        LayerCost(*(_extrapolated(px, at_small, at_large) for at_small, at_large in zip(first, second, strict=True)))
        for first, second in zip(small, large, strict=True)
    )
    source = f"measured at {_side(sizes[0])} and {_side(sizes[1])}, scaled to {_side(shape)}"
    return Costs(layers, source, _bend(px, small, large))


def _scaled(shape: tuple[int, ...], scale: float) -> tuple[int, ...]:
    sides = (min(max(round(side * scale / MULTIPLE), 1) * MULTIPLE, side) for side in shape[2:])
    return (*shape[:2], *sides)


def _extrapolated(px: Sequence[float], small: float, large: float) -> float:
    """Return seconds at ``px[2]`` from those at ``px[0]`` and ``px[1]``: a fixed part, and one in proportion."""
    if px[1] == px[0]:
        return large * px[2] / px[1]
    rate = min(max((large - small) / (px[1] - px[0]), 0.0), large / px[1])
    return large + rate * (px[2] - px[1])


def _spread(readings: Sequence[Runs]) -> float | None:
    """Return how far the middle run of a layer is from its fastest, in the middle over the layers."""
    sums = [[sum(run) for run in zip(runs.forward, runs.backward, strict=True)] for runs in readings]
    spreads = [float(np.median(runs)) / min(runs) - 1 for runs in sums if min(runs) > 0]
    return float(np.median(spreads)) if spreads else None


def _bend(px: Sequence[float], small: Sequence[Sequence[float]], large: Sequence[Sequence[float]]) -> float | None:
    """Return how far the larger tile is from the smaller one in proportion to px, in the middle over the layers."""
    pairs = [(sum(first[:2]), sum(second[:2])) for first, second in zip(small, large, strict=True)]
    bends = [abs(second / (first * px[1] / px[0]) - 1) for first, second in pairs if first > 0]
    return float(np.median(bends)) if bends else None


def _side(shape: tuple[int, ...]) -> str:
    height, width = shape[2:] if len(shape) == 4 else (0, shape[-1])
    return f"{width} px" if height in (0, width) else f"{height} x {width} px"
