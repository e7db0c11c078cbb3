"""Which arrays of a Zarr store are the levels of a slide, and how many um their pixels measure.

Takes the store of an OME-Zarr image, of a collection of them, or of a bare array; gives a ``ZarrImage``. Axes may be
in any order. What the metadata leave open is refused, because it would be read as another picture. Follows OME-Zarr
0.4 and 0.5 (Moore et al., OME-Zarr: a cloud-optimized bioimaging file format, 2023).
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from pipelines.backends.level_reader import Recorded
from pipelines.backends.zarr_store import ZarrArray, ZarrStore, holds, key_of, read_array, read_json
from pipelines.slides.slide import NotThisFormat, SlideError

log = logging.getLogger(__name__)

MARKERS: Final = ("zarr.json", ".zgroup", ".zarray")
"""One of these files lies at the root of every Zarr store (v3, v2 group, v2 array)."""

MAX_LEVELS: Final = 64
MAX_IMAGES: Final = 64
SCALE_TOLERANCE: Final = 0.1
"""By which the extent of a level, px times scale, may differ from that of level 0, besides the rounding of its side."""

AXIS_TYPES: Final = {"t": "time", "c": "channel", "z": "space", "y": "space", "x": "space"}
_RGB: Final = ["FF0000", "00FF00", "0000FF"]
_NO_COLOURS: Final = frozenset(("", "FFFFFF"))
"""Colours of a channel that do not tell whether it is R, G or B. White, or one colour for all, is given to RGB, too."""
UM_PER_UNIT: Final = {
    "angstrom": 1e-4, "picometer": 1e-6, "nanometer": 1e-3, "micrometer": 1.0, "millimeter": 1e3, "centimeter": 1e4,
    "decimeter": 1e5, "meter": 1e6, "inch": 25_400.0,
    "nm": 1e-3, "um": 1.0, "µm": 1.0, "μm": 1.0, "micron": 1.0, "mm": 1e3, "cm": 1e4, "m": 1e6,
}  # fmt: skip
"""Lengths of the specification that a slide may be given in, and the short forms that writers use instead."""


@dataclass(frozen=True)
class ZarrImage:
    """Arrays finest first, their axes, what the store records of um/px in x and y, and a name."""

    arrays: tuple[ZarrArray, ...]
    axes: tuple[str, ...]
    mpp: tuple[Recorded, Recorded]
    name: str = field(default="", repr=False)

    @property
    def width(self) -> int:
        return self.arrays[0].shape[self.axes.index("x")]

    @property
    def height(self) -> int:
        return self.arrays[0].shape[self.axes.index("y")]


def read_images(root: ZarrStore) -> list[ZarrImage]:
    """Return the images of the store at ``root``, in its order.

    Raises:
        NotThisFormat: no Zarr metadata at its root.
        SlideError: no image in it, a codec that is not run, or metadata that contradict themselves.
    """
    if not any(holds(root, *MARKERS)):
        raise NotThisFormat(f"{root}: none of {', '.join(MARKERS)} lies in it")
    try:
        attributes = _attributes(root, "")
        if attributes is None:
            array = read_array(root, "")
            images = [ZarrImage((array,), _bare_axes(root, array), (None, None))]
        else:
            images = _multiscales(root, attributes)
        for image in images:
            _check_image(root, image)
    except SlideError:
        raise
    except Exception as error:  # any key may be absent or of another type
        raise SlideError(
            f"{root}: the Zarr metadata cannot be used ({type(error).__name__}: {error}); is this an OME-Zarr image?"
        ) from error
    return images


def _attributes(root: ZarrStore, path: str) -> Mapping[str, Any] | None:
    """OME attributes of the group at ``path``; None when an array lies there."""
    of_v3, of_v2_array, of_v2 = holds(root, *(key_of(path, name) for name in ("zarr.json", ".zarray", ".zattrs")))
    if of_v3:
        document = read_json(root, path, "zarr.json")
        if document["node_type"] == "array":
            return None
        attributes: Mapping[str, Any] = document.get("attributes", {})
    elif of_v2_array:
        return None
    else:
        read_json(root, path, ".zgroup")
        attributes = read_json(root, path, ".zattrs") if of_v2 else {}
    ome: Mapping[str, Any] = attributes.get("ome", attributes)
    return ome


def _multiscales(root: ZarrStore, attributes: Mapping[str, Any]) -> list[ZarrImage]:
    """The images of an OME-Zarr group."""
    groups: dict[str, Mapping[str, Any]] = {"": attributes}
    if "bioformats2raw.layout" in attributes:  # a collection of images, in groups 0, 1, ...
        groups = {}
        while len(groups) < MAX_IMAGES and any(holds(root, *(key_of(str(len(groups)), name) for name in MARKERS))):
            groups[f"{len(groups)}/"] = _attributes(root, str(len(groups))) or {}
    for inner in groups.values():
        channels = (inner.get("omero") or {}).get("channels") or ()
        colours = [str(channel.get("color") or "").upper().lstrip("#") for channel in channels]
        if len(colours) == len({*colours} - _NO_COLOURS) == 3 and colours != _RGB:
            raise SlideError(
                f"{root}: its three channels have the colours {', '.join(colours)} (omero), so they are not R, G, B; "
                "merge them to 8-bit RGB"
            )
    images = [
        _multiscale(root, below, image)
        for below, inner in groups.items()
        for image in (inner.get("multiscales") or ())[:MAX_IMAGES]
    ]
    if not images:
        raise SlideError(
            f"{root}: this Zarr group has no `multiscales`, so it is no OME-Zarr image; it holds "
            f"{root.members() or 'nothing'}; give the path of the image inside it"
        )
    return images


def _multiscale(root: ZarrStore, below: str, image: Mapping[str, Any]) -> ZarrImage:
    """One image; the paths of its arrays begin ``below``."""
    datasets = image["datasets"]
    if not 1 <= len(datasets) <= MAX_LEVELS:
        raise SlideError(f"{root}: an image has 1 to {MAX_LEVELS} levels; this one names {len(datasets)}")
    axes = tuple(axis["name"] for axis in image["axes"])
    for axis in image["axes"]:
        if axis.get("type") not in (None, AXIS_TYPES.get(axis["name"])):
            raise SlideError(f"{root}: axis {axis['name']!r} is of type {axis['type']!r}; axes are named t, c, z, y, x")
    arrays = [read_array(root, below + str(dataset["path"])) for dataset in datasets]
    if any(len(array.shape) != len(axes) for array in arrays) or not {"x", "y"} <= set(axes):
        shapes = [array.shape for array in arrays]
        raise SlideError(
            f"{root}: axes must name every dimension, x and y among them; got axes {list(axes)}, arrays {shapes}"
        )
    order = sorted(range(len(arrays)), key=lambda i: -arrays[i].shape[axes.index("x")])
    of_image = image.get("coordinateTransformations", ())
    scales = [_scale(root, [*datasets[i]["coordinateTransformations"], *of_image], len(axes)) for i in order]
    arrays = [arrays[i] for i in order]
    first = scales[0]
    um: dict[str, Recorded] = {}
    if first and not all(_same_extent(axes, arrays[0], first, a, s) for a, s in zip(arrays, scales, strict=True)):
        log.warning("%s: the scales of its levels contradict their sizes, so its um/px is not known", root)
    elif first:
        for axis, scale in zip(image["axes"], first, strict=True):
            unit = axis.get("unit")
            if unit in UM_PER_UNIT:
                um[axis["name"]] = scale * UM_PER_UNIT[unit]
            elif unit is not None:  # without a unit a scale says nothing about um
                um[axis["name"]] = f"records a scale of {scale:g} in {str(unit)[:40]!r}, a unit that is not read"
    return ZarrImage(tuple(arrays), axes, (um.get("x"), um.get("y")), _printable_name(image))


def _printable_name(image: Mapping[str, Any]) -> str:
    return "".join(c for c in str(image.get("name") or "")[:64] if c.isprintable())


def _same_extent(
    axes: Sequence[str], first: ZarrArray, first_scale: Sequence[float], array: ZarrArray, scale: Sequence[float] | None
) -> bool:
    """True when px times scale of a level is that of level 0 in x and y; also when the level has no scale."""
    ratios = [
        (first.shape[i] * first_scale[i] / (array.shape[i] * scale[i]), array.shape[i])
        for i in (axes.index("x"), axes.index("y"))
        if scale is not None
    ]
    return all(abs(ratio - 1) <= SCALE_TOLERANCE + 2 / side for ratio, side in ratios)


def _scale(root: ZarrStore, transforms: Sequence[Mapping[str, Any]], axes: int) -> list[float] | None:
    """Length of a px along each axis; None where no transform says it."""
    for transform in transforms:
        if transform["type"] not in ("identity", "scale", "translation"):
            raise SlideError(f"{root}: the coordinate transformation {str(transform['type'])[:60]!r} is not known")
    factors = [transform["scale"] for transform in transforms if transform["type"] == "scale"]
    if any(len(factor) != axes or not all(float(f) > 0 for f in factor) for factor in factors):
        raise SlideError(f"{root}: a scale has one positive number for each of {axes} axes; got {factors}")
    return [math.prod(map(float, along)) for along in zip(*factors, strict=True)] or None


def _bare_axes(root: ZarrStore, array: ZarrArray) -> tuple[str, ...]:
    """Axes of an array that stands alone: its v3 dimension names, else from the place of the 3 channels."""
    names = array.dimension_names
    if names and {"x", "y"} <= set(names):
        return names
    if len(array.shape) == 3 and array.shape[2] == 3:
        return ("y", "x", "c")
    if len(array.shape) == 3 and array.shape[0] == 3:
        return ("c", "y", "x")
    raise SlideError(
        f"{root}: a Zarr array that is no OME-Zarr image must be (height, width, 3) or (3, height, width), or name its "
        f"dimensions x, y and c; got {array.shape}, names {names}"
    )


def _check_image(root: ZarrStore, image: ZarrImage) -> None:
    """Refuse pixels that are not 8-bit grey or RGB, and levels that are not one picture made smaller."""
    axes = image.axes
    if len(set(axes)) < len(axes) or any(
        axis not in AXIS_TYPES and side > 1 for axis, side in zip(axes, image.arrays[0].shape, strict=True)
    ):  # of an axis that nobody knows the first would be read: one colour of three
        raise SlideError(f"{root}: axes are named t, c, z, y and x, each once; got {list(axes)}")
    x, y = axes.index("x"), axes.index("y")
    first = image.arrays[0].shape
    for array in image.arrays:
        channels = array.shape[axes.index("c")] if "c" in axes else 1
        if not re.fullmatch(r"uint8|[|<>]?u1", array.dtype) or channels not in (1, 3):
            raise SlideError(
                f"{root}: pixels must be uint8 with 1 or 3 channels; array {array.path or '/'} is {array.dtype} "
                f"with {channels} channels (shape {array.shape}, axes {list(axes)}); convert it to 8-bit RGB"
            )
        width, height = array.shape[x], array.shape[y]
        if abs(height - width * first[y] / first[x]) > 2 + 0.01 * height:
            raise SlideError(
                f"{root}: level {array.path or '/'} of {width} x {height} px is not level 0 of {first[x]} x {first[y]} "
                "px made smaller: the metadata are damaged"
            )
