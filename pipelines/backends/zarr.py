"""Zarr slides: OME-Zarr 0.4 (Zarr v2) and 0.5 (Zarr v3) image pyramids, and a bare Zarr array.

Takes a folder, or a file with a URL, gives a ``Slide``. ``ome_zarr`` reads and judges what the store says of itself;
the Zarr library only ever sees arrays that it let through. Axes may be in any order; of time points and focal planes
the first is read. A chunk that is absent was left out as empty or was lost: it is the fill value where a coarser level
bears that out, and unreadable everywhere else.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np
import zarr

from pipelines.backends.level_reader import bands, choose_scene, describe, find_scenes, level0_mpp, pad
from pipelines.backends.ome_zarr import ZarrImage, read_images
from pipelines.backends.zarr_store import NO_FILE, ZarrStore, bound_v2, key_of, most_bytes, open_store
from pipelines.slides.geometry import levels_from_sizes
from pipelines.slides.pyramid import PyramidSlide
from pipelines.slides.slide import NotThisFormat, Pixels, SlideError, TileReadError, is_disk_error

BAND_BYTES = 64 << 20
"""Decoded pixels held beside the caller's array."""

_BLURRED_PX: Final = 1
"""Px of a coarser level, at the edge of what was left out, that its neighbours may have run into."""


class ZarrReader:
    """A ``LevelReader`` over one Zarr array per level."""

    name = "zarr"

    def __init__(self, store: ZarrStore, image: ZarrImage, arrays: Sequence[zarr.Array]) -> None:
        self._store, self._image = store, image
        self._arrays = tuple(arrays)
        self._axes = image.axes
        kept = [axis for axis in self._axes if axis in "yxc"]
        self._to_yxc = [kept.index(axis) for axis in "yxc" if axis in kept]
        self._empty: set[tuple[int, tuple[int, ...]]] = set()

    def read_level(self, level: int, l_x: int, l_y: int, out: Pixels) -> None:
        array = self._arrays[level]
        y_axis = self._axes.index("y")
        inside = pad(out, l_x, l_y, array.shape[self._axes.index("x")], array.shape[y_axis])
        if inside is None:
            return
        rows, columns = inside.out.shape[:2]
        for start, stop in bands(inside.l_y, rows, array.chunks[y_axis], BAND_BYTES // (columns * 3)):
            y = inside.l_y + start
            box = self._box(slice(inside.l_x, inside.l_x + columns), slice(y, y + stop - start))
            for chunk in self._absent(level, box):
                if not self._was_left_out(level, chunk):
                    raise TileReadError(
                        f"{self._store}: level {level}, chunk {'.'.join(map(str, chunk))} is not in the store, and no "
                        f"coarser level shows that it is empty (fill value {self._image.arrays[level].fill}): the "
                        "slide was copied in part, or has to be written with its empty chunks"
                    )
            try:
                index = tuple(s if axis in "xyc" else 0 for axis, s in zip(self._axes, box, strict=True))
                band = np.asarray(array[index])
            except SlideError:  # a server that does not answer: the slide's fault, not the chunk's
                raise
            except Exception as error:  # codecs raise whatever they like on damaged chunks
                if is_disk_error(error):
                    raise
                raise TileReadError(
                    f"{self._store}: pixels cannot be read at level {level}, x {inside.l_x}, y {y}, "
                    f"{columns} x {stop - start} px: {type(error).__name__}: {error}; the chunk is damaged"
                ) from error
            band = band.transpose(self._to_yxc)
            inside.out[start:stop] = band if band.ndim == 3 else band[..., None]  # one channel: grey

    def close(self) -> None:
        self._store.close()

    def _box(self, x: slice, y: slice) -> tuple[slice, ...]:
        """A box of px of a level, the first of its other axes but the channels, one slice per axis."""
        channels = self._image.arrays[0].shape[self._axes.index("c")] if "c" in self._axes else 1
        sides = {"x": x, "y": y, "c": slice(0, channels)}
        return tuple(sides.get(axis, slice(0, 1)) for axis in self._axes)

    def _absent(self, level: int, box: tuple[slice, ...]) -> list[tuple[int, ...]]:
        """Chunks of ``box`` that have no file and are not known to be empty."""
        about, metadata = self._image.arrays[level], self._arrays[level].metadata
        ranges = [range(s.start // n, -(-s.stop // n)) for s, n in zip(box, about.chunks, strict=True)]
        most = most_bytes(about.chunks)
        asked = [chunk for chunk in itertools.product(*ranges) if (level, chunk) not in self._empty]
        keys = [key_of(about.path, metadata.encode_chunk_key(chunk)) for chunk in asked]
        absent: list[tuple[int, ...]] = []
        for chunk, key, size in zip(asked, keys, self._store.sizes(keys), strict=True):
            if size is None:
                absent.append(chunk)
            elif size == NO_FILE or size > most:
                what = "is no file" if size == NO_FILE else f"has {size} bytes"
                raise TileReadError(
                    f"{self._store}: level {level}, {key} {what}; a chunk {about.chunks} is a file of {most} "
                    "bytes at most"
                )
        return absent

    def _was_left_out(self, level: int, chunk: tuple[int, ...]) -> bool:
        """True when the finest coarser level that is whole over a chunk has nothing but the fill value there."""
        fine = self._image.arrays[level]
        if fine.fill is None:
            return False
        for coarser in range(level + 1, len(self._arrays)):
            array = self._image.arrays[coarser]
            box: list[slice] = []
            for axis, i, n, fine_side, side in zip(
                self._axes, chunk, fine.chunks, fine.shape, array.shape, strict=True
            ):
                first, last = i * n, min((i + 1) * n, fine_side)
                if axis in "xy":
                    ratio = side / fine_side
                    first = 0 if first == 0 else math.ceil(first * ratio) + _BLURRED_PX
                    last = side if last == fine_side else math.floor(last * ratio) - _BLURRED_PX
                box.append(slice(first, last) if axis in "xyc" else slice(0, 1))
            if any(s.start >= s.stop for s in box):
                return False
            if not self._absent(coarser, tuple(box)):
                if empty := bool((np.asarray(self._arrays[coarser][tuple(box)]) == fine.fill).all()):
                    self._empty.add((level, chunk))
                return empty
        return False


def open_zarr(path: Path, *, mpp: float | None, scene: int | None = None) -> PyramidSlide:
    """Open a Zarr store as a slide.

    Raises:
        NotThisFormat: not a folder with Zarr metadata at its root, nor a URL.
        SlideError: no image in the store, or several of similar size without ``scene``; unknown codecs, pixels that
            are not 8-bit RGB or grey, no usable mpp; or a server that has no such slide.
    """
    store = open_store(path)
    try:
        images = _images(path, store)
        image = _chosen(store, images, scene)
        store.most_bytes = max(store.most_bytes, *(most_bytes(array.chunks) for array in image.arrays))
        try:
            arrays = [
                zarr.open_array(store.files, path=a.path, zarr_format=a.zarr_format, mode="r") for a in image.arrays
            ]
            for array in arrays:
                bound_v2(array)
        except SlideError:
            raise
        except Exception as error:  # what the library itself finds wrong with metadata
            raise SlideError(f"{store}: the Zarr metadata cannot be used ({type(error).__name__}: {error})") from error
        x, y = image.axes.index("x"), image.axes.index("y")
        sizes = [(array.shape[x], array.shape[y]) for array in image.arrays]
        levels = levels_from_sizes(sizes, level0_mpp(path, *image.mpp, mpp))
        return PyramidSlide(path, ZarrReader(store, image, arrays), levels)
    except BaseException:
        store.close()
        raise


def remote_metadata(path: Path) -> bytes:
    """Return levels, chunks, axes and um/px of the slide at a URL, as text. Raises SlideError if they are unusable."""
    with contextlib.closing(open_store(path)) as store:
        images = _images(path, store)
        return repr(images if len(images) > 1 else images[0]).encode()


def other_zarr_images(path: Path, scene: int | None) -> list[str]:
    """Return name and size of a store's images that are not the slide; raises SlideError as ``open_zarr`` does."""
    with contextlib.closing(open_store(path)) as store:
        images = _images(path, store)
        chosen = _chosen(store, images, scene)
        return [describe(image) for image in images if image is not chosen]


def _chosen(store: ZarrStore, images: list[ZarrImage], scene: int | None) -> ZarrImage:
    return choose_scene(str(store), sorted(find_scenes(images), key=images.index), scene)


def _images(path: Path, store: ZarrStore) -> list[ZarrImage]:
    """Images of the store; no other backend reads a URL."""
    try:
        return read_images(store)
    except NotThisFormat as fault:
        if path.is_dir():
            raise
        raise SlideError(f"{fault} (the server says 404 or 403); check the URL") from fault
