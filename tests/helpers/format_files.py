"""Slides of the formats of which no real file may be shipped, made from the pixels of one that may.

Takes a folder; leaves a small slide of each kind in it: those that are read, and those that have to be refused.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import imagecodecs
import numpy as np
import tifffile
import zarr

from pipelines.backends.registry import open_slide
from pipelines.slides.geometry import Bounds, Region
from pipelines.slides.slide import Pixels
from tests.helpers.dicom_file import write_dicom_slide
from tests.helpers.mrxs_file import write_mrxs

SOURCE = Path(__file__).parents[2] / "data" / "real" / "CMU-1-Small-Region.svs"
SVS_TILE = 240
"""As Aperio's."""
APERIO = "Aperio Image Library v12.0.15\r\n{}x{} [0,0 {}x{}] ({}x{}) J2K Q=30|AppMag = 20|MPP = 0.499"
TIFFS: dict[str, dict[str, Any]] = {
    "lzw.tif": {"compression": "lzw", "predictor": 2},
    "zstd.tif": {"compression": "zstd", "predictor": 2},
    "deflate-bigtiff.tif": {"compression": "deflate", "bigtiff": True},
    "uncompressed.tif": {},
}
_UM = {"resolution": (1e4 / 0.499,) * 2, "resolutionunit": "CENTIMETER"}


@functools.cache
def tissue() -> list[Pixels]:
    """Three levels of tissue, each a half of the one before."""
    with open_slide(SOURCE) as slide:
        pixels = slide.read(Region(800, 900, 384, 256, slide.mpp))
    return [np.ascontiguousarray(pixels[::step, ::step]) for step in (1, 2, 4)]


def write_read_ones(folder: Path) -> None:
    """Write one slide of each kind that is read."""
    levels = tissue()
    for name, options in TIFFS.items():
        write_tiff(folder / name, levels, **options)
    for compression in (33003, 33005):
        write_svs(folder / f"jpeg2000-{compression}.svs", levels, compression)
    for encoding in ("jpeg", "jpeg2000", "jpeg2000-lossless", "raw"):
        write_dicom_slide(folder / f"dicom-{encoding}", levels, encoding=encoding)
    write_mrxs(folder / "bounds.mrxs", np.tile(levels[0], (2, 2, 1)), Bounds(256 + 20, 12, 256, 256))
    write_qptiff(folder / "brightfield.qptiff", levels)
    for version in ("0.4", "0.5"):
        write_ome_zarr(folder / f"ome-{version}.ome.zarr", levels, version, mpp=0.499)


def write_refused_ones(folder: Path) -> None:
    """Write one slide of each kind that cannot be read as what it is."""
    levels = tissue()
    deep = [level.astype(np.uint16) * 257 for level in levels]
    write_tiff(folder / "rgb-16-bit.tif", deep)
    write_tiff(folder / "grey-16-bit.tif", [level[..., 1] for level in deep])
    write_tiff(folder / "rgb-float.tif", [level.astype(np.float32) / 255 for level in levels])
    write_qptiff(
        folder / "fluorescence.qptiff", [np.ascontiguousarray(levels[0][..., i]) for i in range(3)], planes=True
    )
    stack = np.ascontiguousarray(np.moveaxis(deep[0], 2, 0))
    tifffile.imwrite(
        folder / "fluorescence.ome.tif", stack, tile=(128, 128), photometric="minisblack",
        metadata={"axes": "CYX", "PhysicalSizeX": 0.5, "PhysicalSizeY": 0.5},
    )  # fmt: skip
    write_ome_zarr(folder / "rgb-16-bit.ome.zarr", deep)
    five = [np.concatenate([level, level[..., :2]], axis=2) for level in levels]
    write_ome_zarr(folder / "five-channels.ome.zarr", five)


def write_tiff(path: Path, levels: list[Any], *, bigtiff: bool = False, **options: Any) -> None:
    with tifffile.TiffWriter(path, bigtiff=bigtiff) as file:
        for i, pixels in enumerate(levels):
            file.write(
                pixels, tile=(256, 256), subfiletype=int(i > 0), metadata=None, **_UM,
                photometric="rgb" if pixels.ndim == 3 else "minisblack", **options,
            )  # fmt: skip


def write_svs(path: Path, levels: list[Pixels], compression: int) -> None:
    """Write an Aperio slide of JPEG 2000 tiles: 33005 holds RGB, 33003 YCbCr without saying so."""
    with tifffile.TiffWriter(path) as file:
        for i, pixels in enumerate(levels):
            height, width = pixels.shape[:2]
            tiles = list(_jpeg2000_tiles(pixels, as_ycbcr if compression == 33003 else np.ascontiguousarray))
            file.write(
                iter(tiles), shape=pixels.shape, dtype=np.uint8, tile=(SVS_TILE, SVS_TILE), photometric="rgb",
                compression=compression, metadata=None, subfiletype=int(i > 0),
                description=APERIO.format(width, height, width, height, SVS_TILE, SVS_TILE),
            )  # fmt: skip


def _jpeg2000_tiles(pixels: Pixels, prepared: Callable[[Pixels], Pixels]) -> Iterator[bytes]:
    for y in range(0, pixels.shape[0], SVS_TILE):
        for x in range(0, pixels.shape[1], SVS_TILE):
            tile = np.full((SVS_TILE, SVS_TILE, 3), 255, np.uint8)
            inside = pixels[y : y + SVS_TILE, x : x + SVS_TILE]
            tile[: inside.shape[0], : inside.shape[1]] = inside
            yield bytes(imagecodecs.jpeg2k_encode(prepared(tile), level=45, codecformat="j2k", mct=False))


def as_ycbcr(rgb: Pixels) -> Pixels:
    """Full-range YCbCr (ITU-R BT.601), as in JFIF."""
    matrix = np.array([[0.299, 0.587, 0.114], [-0.168736, -0.331264, 0.5], [0.5, -0.418688, -0.081312]])
    ycbcr = rgb @ matrix.T + [0, 128, 128]
    return np.ascontiguousarray(np.clip(np.rint(ycbcr), 0, 255).astype(np.uint8))


def write_qptiff(path: Path, pages: list[Pixels], *, planes: bool = False) -> None:
    """Write what Akoya's scanners write: reduced pages of brightfield, or a page for each channel (``planes``)."""
    about = "<PerkinElmer-QPI-ImageDescription><ImageType>{}</ImageType></PerkinElmer-QPI-ImageDescription>"
    with tifffile.TiffWriter(path, bigtiff=True) as file:
        for i, pixels in enumerate(pages):
            kind = "FullResolution" if planes or i == 0 else "ReducedResolution"
            file.write(
                pixels, tile=(128, 128), description=about.format(kind), metadata=None, software="PerkinElmer-QPI",
                photometric="rgb" if pixels.ndim == 3 else "minisblack", compression="lzw", **_UM,
                subfiletype=int(kind == "ReducedResolution"),
            )  # fmt: skip


def write_ome_zarr(
    path: Path,
    levels: Sequence[Any],
    version: str = "0.4",
    *,
    axes: str = "cyx",
    unit: str | None = "micrometer",
    mpp: float = 0.25,
) -> Path:
    """Write ``levels``, (height, width, channels) each a half of the one before; chunks do not divide the image."""
    group = zarr.create_group(path, zarr_format=3 if version == "0.5" else 2)
    datasets: list[dict[str, Any]] = []
    kept = [axis for axis in axes if axis in "yxc"]
    for i, pixels in enumerate(levels):
        data = pixels.transpose(["yxc".index(axis) for axis in kept])
        data = data.reshape([data.shape[kept.index(axis)] if axis in kept else 1 for axis in axes])
        chunks = tuple({"y": 97, "x": 113}.get(axis, size) for axis, size in zip(axes, data.shape, strict=True))
        group.create_array(str(i), data=np.ascontiguousarray(data), chunks=chunks)
        um = mpp * 2**i * (1000 if unit == "nanometer" else 1)
        scale = [um if axis in "yx" else 1.0 for axis in axes]
        datasets.append({"path": str(i), "coordinateTransformations": [{"type": "scale", "scale": scale}]})
    kinds = {"t": "time", "c": "channel"}
    described = [
        {"name": a, "type": kinds.get(a, "space")} | ({"unit": unit} if a in "yx" and unit else {}) for a in axes
    ]
    image = {"multiscales": [{"version": version, "axes": described, "datasets": datasets}]}
    group.attrs.update({"ome": {"version": "0.5"} | image} if version == "0.5" else image)
    return path
