"""Two re-made ways of MPI4DL (998d9ad) to compute parts of a tile, for the table of teams: halos without gradients, and
halos fetched once for several layers, which are padded once.

All parts lie in one process, and what would be sent is cut out of the neighbour: only its arithmetic is of interest.
Takes one of the table's networks; gives its output. The last convolution is computed on the whole, as after its join.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.exactness.spatial_ops import Network, Together

PEER_OPERATIONS = (
    "convolution 3x3",
    "convolution 7x7, stride 2",
    "max pool 3x3, stride 2",
    "batch norm",
    "convolution, batch norm, ReLU",
)
"""What it has layers for."""
DETACHED, ONCE, DTENSOR = "halos without gradients", "halos padded once", "DTensor"


def by_detached_halos(network: Network, images: Tensor, parts: int) -> Tensor:
    """Return the output where each layer fetches its halo, whose gradient stays with who fetched it.

    Raises:
        ValueError: rows that it does not divide.
    """
    bands = _bands(images, parts)
    for layer in _layers(network):
        if isinstance(layer, (nn.Conv2d, nn.MaxPool2d)):
            (halo,) = {int(p) for p in _pair(layer.padding)}
            wide = [_with_halo(bands, part, halo) for part in range(parts)]
            bands = [_without_pad(layer, band, halo) for band in wide]
        else:  # its batch norm is of a part
            bands = [layer(band) for band in bands]
    whole: Tensor = network.after(torch.cat(bands, 2))
    return whole


def by_halos_padded_once(network: Network, images: Tensor, parts: int) -> Tensor:
    """Return the output where the halo of all layers is fetched once, zeros outside the image, and no layer pads.

    Raises:
        ValueError: rows that it does not divide, or strides, which it does not fuse.
    """
    layers = _layers(network)
    windows = [layer for layer in layers if isinstance(layer, (nn.Conv2d, nn.MaxPool2d))]
    if any(_pair(layer.stride) != (1, 1) for layer in windows):
        raise ValueError("halos of layers with strides are not fetched together")
    halo = sum(int(_pair(layer.padding)[0]) for layer in windows)
    bands = _bands(images, parts)
    bands = [F.pad(_with_halo(bands, part, halo), (halo, halo, 0, 0)) for part in range(parts)]
    for layer in layers:
        if isinstance(layer, (nn.Conv2d, nn.MaxPool2d)):
            bands = [_bare(layer)(band) for band in bands]
        else:
            bands = [layer(band) for band in bands]
    whole: Tensor = network.after(torch.cat(bands, 2))
    return whole


def _layers(network: Network) -> list[nn.Module]:
    operation = network.operation
    return [network.before, *(operation.layers if isinstance(operation, Together) else (operation,))]


def _bands(images: Tensor, parts: int) -> list[Tensor]:
    rows = images.shape[2]
    if rows % (4 * parts) or rows & (rows - 1):
        raise ValueError(f"{rows} rows are no power of two")
    return list(images.chunk(parts, 2))


def _with_halo(bands: Sequence[Tensor], part: int, halo: int) -> Tensor:
    """A part between rows of its neighbours, without their gradients; zeros outside the image."""
    band = bands[part]
    if not halo:
        return band
    outside = torch.zeros_like(band[:, :, :halo])
    above = bands[part - 1][:, :, -halo:].clone().detach() if part else outside
    below = bands[part + 1][:, :, :halo].clone().detach() if part + 1 < len(bands) else outside
    return torch.cat([above, band, below], 2)


def _without_pad(layer: nn.Conv2d | nn.MaxPool2d, band: Tensor, halo: int) -> Tensor:
    """Columns are padded by zeros as rows are, before maxima too."""
    rows = _bare(layer)(F.pad(band, (halo, halo, 0, 0)))
    return rows


def _bare(layer: nn.Module) -> Callable[[Tensor], Tensor]:
    if isinstance(layer, nn.Conv2d):
        return lambda band: F.conv2d(band, layer.weight, layer.bias, layer.stride, 0, layer.dilation, layer.groups)
    assert isinstance(layer, nn.MaxPool2d)
    return lambda band: F.max_pool2d(band, layer.kernel_size, layer.stride)


def _pair(value: object) -> tuple[int, int]:
    numbers = value if isinstance(value, tuple) else (value, value)
    return int(numbers[0]), int(numbers[1])
