"""Zarr slides: OME-Zarr 0.4 (Zarr v2) and 0.5 (Zarr v3) image pyramids, and a bare Zarr array.

Takes a folder, gives a ``Slide``. Follows the OME-Zarr 0.4 and 0.5 specifications (Moore et al., OME-Zarr: a
cloud-optimized bioimaging file format, 2023): axes in any order, um/px from the scales and the axes' units. Of time
points and focal planes the first is read. A chunk that is absent is the fill value, as Zarr has it, not a fault.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import zarr
import zarr.storage

from pipelines.backends.padding import pad
from pipelines.backends.resolution import level0_mpp
from pipelines.geometry import levels_from_sizes
from pipelines.pyramid import PyramidSlide
from pipelines.slide import NotThisFormat, Pixels, SlideError, TileReadError

MARKERS: Final = ("zarr.json", ".zgroup", ".zarray")
"""One of these files lies at the root of every Zarr store (v3, v2 group, v2 array)."""

UM_PER_UNIT: Final = {
    "angstrom": 1e-4, "picometer": 1e-6, "nanometer": 1e-3, "micrometer": 1.0, "millimeter": 1e3, "centimeter": 1e4,
    "decimeter": 1e5, "meter": 1e6, "inch": 25_400.0,
    "nm": 1e-3, "um": 1.0, "µm": 1.0, "μm": 1.0, "micron": 1.0, "mm": 1e3, "cm": 1e4, "m": 1e6,
}  # fmt: skip
"""Lengths of the specification that a slide may be given in, and the short forms that writers use instead."""

BAND_BYTES = 64 << 20
"""Decoded pixels held beside the caller's array; a band ends where chunks end, so that no chunk is decoded twice."""


class ZarrReader:
    """A ``LevelReader`` over one Zarr array per level.

    Args:
        path: the store, for messages.
        arrays: one per level, uint8, all with the axes ``axes``.
        axes: names, one per dimension; ``x`` and ``y`` are among them, ``c`` may be.
    """

    name = "zarr"

    def __init__(self, path: Path, arrays: Sequence[zarr.Array], axes: Sequence[str]) -> None:
        self._path = path
        self._arrays = tuple(arrays)
        self._axes = tuple(axes)
        kept = [axis for axis in self._axes if axis in "yxc"]
        self._to_yxc = [kept.index(axis) for axis in "yxc" if axis in kept]

    def read_level(self, level: int, l_x: int, l_y: int, out: Pixels) -> None:
        array = self._arrays[level]
        y_axis = self._axes.index("y")
        inside = pad(out, l_x, l_y, array.shape[self._axes.index("x")], array.shape[y_axis])
        if inside is None:
            return
        rows, columns = inside.out.shape[:2]
        chunk_rows = array.chunks[y_axis]
        band_rows = max(1, BAND_BYTES // (columns * 3) // chunk_rows) * chunk_rows
        start = 0
        while start < rows:
            y = inside.l_y + start
            stop = min(rows, start + band_rows - y % band_rows)
            where = {"y": slice(y, y + stop - start), "x": slice(inside.l_x, inside.l_x + columns), "c": slice(None)}
            try:
                band = np.asarray(array[tuple(where.get(axis, 0) for axis in self._axes)])
            except Exception as error:  # codecs raise whatever they like on damaged chunks
                raise TileReadError(
                    f"{self._path}: pixels cannot be read at level {level}, x {inside.l_x}, y {y}, "
                    f"{columns} x {stop - start} px: {type(error).__name__}: {error}; the chunk is damaged"
                ) from error
            band = band.transpose(self._to_yxc)
            inside.out[start:stop] = band if band.ndim == 3 else band[..., None]  # one channel: grey
            start = stop

    def close(self) -> None:
        self._arrays = ()


def open_zarr(path: Path, *, mpp: float | None) -> PyramidSlide:
    """A slide over a Zarr store.

    Raises:
        NotThisFormat: not a folder with Zarr metadata at its root.
        SlideError: no image in the store, pixels that are not 8-bit RGB or grey, or no usable mpp.
    """
    if not path.is_dir() or not any((path / marker).is_file() for marker in MARKERS):
        raise NotThisFormat(f"{path}: not a folder with one of {', '.join(MARKERS)}")
    try:
        node = zarr.open(store=zarr.storage.LocalStore(path, read_only=True), mode="r")
        alone = isinstance(node, zarr.Array)
        arrays, axes, scale = ([node], _bare_axes(path, node), (None, None)) if alone else _multiscale(path, node)
    except SlideError:
        raise
    except Exception as error:  # the metadata is JSON written by anyone
        raise SlideError(
            f"{path}: the Zarr metadata cannot be used ({type(error).__name__}: {error}); is this an OME-Zarr image?"
        ) from error
    sizes = [(array.shape[axes.index("x")], array.shape[axes.index("y")]) for array in arrays]
    _check_pixels(path, arrays, axes)
    return PyramidSlide(path, ZarrReader(path, arrays, axes), levels_from_sizes(sizes, level0_mpp(path, *scale, mpp)))


def _multiscale(path: Path, group: zarr.Group) -> tuple[list[zarr.Array], list[str], tuple[float | None, float | None]]:
    """Arrays finest first, axes, and (x, y) um/px of the first image of an OME-Zarr group."""
    attributes: Mapping[str, Any] = group.attrs.get("ome", group.attrs)
    if "bioformats2raw.layout" in attributes:  # a collection of images; the slide is the first
        group = group["0"]
        attributes = group.attrs.get("ome", group.attrs)
    multiscales = attributes.get("multiscales")
    if not multiscales:
        below = sorted(name for name, _ in group.members())
        raise SlideError(
            f"{path}: this Zarr group has no `multiscales`, so it is no OME-Zarr image; it holds "
            f"{', '.join(below[:8]) or 'nothing'}; give the path of the image inside it"
        )
    image = multiscales[0]
    axes = [axis["name"] for axis in image["axes"]]
    arrays = [group[dataset["path"]] for dataset in image["datasets"]]
    if any(array.ndim != len(axes) for array in arrays) or not {"x", "y"} <= set(axes):
        shapes = [array.shape for array in arrays]
        raise SlideError(
            f"{path}: axes must name every dimension, x and y among them; got axes {axes}, arrays {shapes}"
        )
    scale = [1.0] * len(axes)
    for transform in [*image["datasets"][0]["coordinateTransformations"], *image.get("coordinateTransformations", ())]:
        if transform["type"] == "scale":
            scale = [a * float(b) for a, b in zip(scale, transform["scale"], strict=True)]
    um = {
        axis["name"]: s * UM_PER_UNIT[axis["unit"]]
        for axis, s in zip(image["axes"], scale, strict=True)
        if axis.get("unit") in UM_PER_UNIT  # without a unit a scale says nothing about um
    }
    order = sorted(range(len(arrays)), key=lambda i: -arrays[i].shape[axes.index("x")])
    return [arrays[i] for i in order], axes, (um.get("x"), um.get("y"))


def _bare_axes(path: Path, array: zarr.Array) -> list[str]:
    """Axes of an array that stands alone: its v3 dimension names, else from the place of the 3 channels."""
    names = getattr(array.metadata, "dimension_names", None)
    if names and None not in names:
        axes = [str(name) for name in names]
        if {"x", "y"} <= set(axes):
            return axes
    if array.ndim == 3 and array.shape[2] == 3:
        return ["y", "x", "c"]
    if array.ndim == 3 and array.shape[0] == 3:
        return ["c", "y", "x"]
    raise SlideError(
        f"{path}: a Zarr array that is no OME-Zarr image must be (height, width, 3) or (3, height, width), or name its "
        f"dimensions x, y and c; got {array.shape}, names {names}"
    )


def _check_pixels(path: Path, arrays: Sequence[zarr.Array], axes: Sequence[str]) -> None:
    for array in arrays:
        channels = array.shape[axes.index("c")] if "c" in axes else 1
        if array.dtype != np.uint8 or channels not in (1, 3):
            raise SlideError(
                f"{path}: pixels must be uint8 with 1 or 3 channels; array {array.path or '/'} is {array.dtype} "
                f"with {channels} channels (shape {array.shape}, axes {axes}); convert it to 8-bit RGB"
            )
