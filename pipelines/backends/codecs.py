"""Decoders of the compressed tiles of a TIFF level, one for each compression that slides use.

Takes a page's tags; gives a function that decodes one tile's bytes into the caller's pixels, or says why there is none.
Follows TIFF 6.0 (LZW, deflate, horizontal differencing), libtiff's number for Zstandard and Aperio's for JPEG 2000.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Final, TypeAlias

import imagecodecs
import numpy as np

from pipelines.backends.jpeg import JpegTiles
from pipelines.backends.tiff_page import Page, Tag
from pipelines.slides.slide import Pixels

TileDecoder: TypeAlias = Callable[[bytes, Pixels], None]
"""Decodes bytes into uint8 (tile height, tile width, 3), contiguous; ValueError when the data is damaged."""

_JPEG, _JPEG2000 = 7, (33005, 34712)
_BLACK_IS_ZERO, _RGB, _YCBCR = 1, 2, 6
_DIFFERENCED = 2
_CODESTREAM: Final = b"\xff\x4f\xff\x51"
_MAX_PARTS: Final = 4096
_UNPACK: Final[dict[int, Callable[[bytes, int], bytes | bytearray]]] = {
    1: lambda data, size: data,
    5: lambda data, size: imagecodecs.lzw_decode(data, out=size + 1),  # one more than fits tells that more would come
    8: lambda data, size: imagecodecs.zlib_decode(data, out=size),
    32946: lambda data, size: imagecodecs.zlib_decode(data, out=size),
    50000: lambda data, size: imagecodecs.zstd_decode(data, out=size),
}


def decoder(page: Page) -> TileDecoder | str:
    """Return a decoder for the tiles of ``page``, or the reason why they cannot be decoded here."""
    samples, bits = page.number(Tag.SAMPLES, 1), set(page.array(Tag.BITS).tolist()) or {1}
    photometric, compression = page.number(Tag.PHOTOMETRIC, -1), page.number(Tag.COMPRESSION, 1)
    if bits != {8} or samples not in (1, 3) or (samples == 3 and page.number(Tag.PLANAR, 1) != 1):
        return f"slides have 1 or 3 interleaved samples of 8 bits; this has {samples} of {sorted(bits)} bits"
    if photometric not in ((_BLACK_IS_ZERO,) if samples == 1 else (_RGB, _YCBCR)):
        return f"colours of kind {photometric} (PhotometricInterpretation) are not read"
    if compression == _JPEG:
        return JpegTiles(page.blob(Tag.JPEG_TABLES), ycbcr=photometric == _YCBCR)
    if photometric == _YCBCR:
        return f"YCbCr colours in compression {compression} are not read"
    if compression in _JPEG2000:
        return _Jpeg2000(samples)
    if compression in _UNPACK and page.number(Tag.PREDICTOR, 1) in (1, _DIFFERENCED):
        return _Unpacked(_UNPACK[compression], samples, page.number(Tag.PREDICTOR, 1) == _DIFFERENCED)
    return f"compression {compression} with predictor {page.number(Tag.PREDICTOR, 1)} is not read"


class _Unpacked:
    """Tiles that are plain samples once unpacked."""

    def __init__(self, unpack: Callable[[bytes, int], bytes | bytearray], samples: int, differenced: bool) -> None:
        self._unpack, self._samples, self._differenced = unpack, samples, differenced

    def __call__(self, data: bytes, out: Pixels) -> None:
        shape = (*out.shape[:2], self._samples)
        size = out.shape[0] * out.shape[1] * self._samples
        try:
            raw = self._unpack(data, size)
        except RuntimeError as error:
            raise ValueError(str(error)) from error
        if len(raw) != size:
            raise ValueError(f"{len(raw)} bytes of pixels instead of {size}")
        pixels = np.frombuffer(raw, np.uint8).reshape(shape)
        if self._differenced:
            np.cumsum(pixels, axis=1, dtype=np.uint8, out=out if self._samples == 3 else None)
            pixels = out if self._samples == 3 else np.cumsum(pixels, axis=1, dtype=np.uint8)
        if pixels is not out:
            out[...] = pixels


class _Jpeg2000:
    def __init__(self, samples: int) -> None:
        self._samples = samples

    def __call__(self, data: bytes, out: Pixels) -> None:
        self._check_size(data, out)
        try:
            pixels = imagecodecs.jpeg2k_decode(data)
        except RuntimeError as error:
            raise ValueError(str(error)) from error
        pixels = pixels.reshape(*pixels.shape[:2], -1)
        if pixels.shape != (*out.shape[:2], self._samples) or pixels.dtype != np.uint8:
            raise ValueError(f"{pixels.dtype} {pixels.shape} instead of uint8 {(*out.shape[:2], self._samples)}")
        out[...] = pixels

    def _check_size(self, data: bytes, out: Pixels) -> None:
        """The decoder allocates what the SIZ marker asks for (ITU-T T.800, A.5.1), so that is read first."""
        at = data.find(_CODESTREAM)
        if at < 0 or len(data) < at + 42:
            raise ValueError("no JPEG 2000 codestream")
        right, bottom, left, top, part_width, part_height, _, _, samples = struct.unpack_from(">8IH", data, at + 8)
        size, parts = (bottom - top, right - left), right * bottom / max(1, part_width * part_height)
        if (*size, samples) != (*out.shape[:2], self._samples) or parts > _MAX_PARTS:
            raise ValueError(
                f"a JPEG 2000 stream of {size[1]} x {size[0]} px, {samples} samples and {parts:.0f} parts instead of "
                f"{out.shape[1]} x {out.shape[0]} px and {self._samples} samples"
            )
