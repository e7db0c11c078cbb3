"""Decoders of the compressed tiles of a TIFF level, one for each compression that slides use.

Gives a function that decodes one tile's bytes into the caller's pixels, or says why there is none. JPEG goes straight
from libjpeg-turbo into the caller's buffer. Follows TIFF 6.0 (LZW, deflate, horizontal differencing), TIFF Technical
Note 2 (JPEG), libtiff's number for Zstandard and Aperio's for JPEG 2000.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Self, TypeAlias

import imagecodecs
import numpy as np
import simplejpeg

from pipelines.backends.tiff_page import Page, Tag
from pipelines.slides.slide import Pixels

SOI: Final = b"\xff\xd8"
EOI: Final = b"\xff\xd9"
_APP0, _APP14, _SOF0, _DRI, _SOS = 0xE0, 0xEE, 0xC0, 0xDD, 0xDA
_OTHER_FRAMES: Final = (*range(0xC1, 0xC4), *range(0xC5, 0xC8), *range(0xC9, 0xCC), *range(0xCD, 0xD0))
_COLOUR_MARKERS: Final = (b"\xff\xe0", b"\xff\xee")
_ADOBE: Final = b"\xff\xee\x00\x0eAdobe\x00\x64\x00\x00\x00\x00"
"""An Adobe segment but for its last byte: 0 says that the components are RGB (or grey), 1 that they are YCbCr."""


class OtherJpeg(ValueError):
    """Whole JPEG data of a kind that is not read here; another reader may."""


class JpegTiles:
    """Decoder of the JPEG tiles of one level.

    ``ycbcr`` rules over markers in a tile: Aperio writes RGB components with no marker at all, which a decoder left
    alone takes for YCbCr.

    Args:
        tables: the level's JPEGTables, merged into a header once; None when each tile brings its own.
        ycbcr: the components are YCbCr, not RGB or grey.
    """

    def __init__(self, tables: bytes | None, *, ycbcr: bool) -> None:
        merged = b"".join(segment for marker, segment in segments(tables or SOI) if marker not in (_APP0, _APP14))
        self._header = SOI + merged + _ADOBE + bytes([ycbcr])

    def __call__(self, data: bytes, out: Pixels) -> None:
        """Decode one tile into ``out``: uint8 (tile height, tile width, 3), contiguous.

        Raises:
            ValueError: the data is damaged, or its size is another than ``out``'s.
        """
        _check_start(data)
        start = 2
        while data[start : start + 2] in _COLOUR_MARKERS:
            start += 2 + int.from_bytes(data[start + 2 : start + 4], "big")
        decode(self._header + data[start:], out)


def stored_ycbcr(
    tables: bytes | None, data: bytes, *, samples: int, ycbcr: bool, factors: tuple[int, int]
) -> bool | str:
    """Return whether a tile's components are YCbCr, or why its own headers and the TIFF's tags contradict each other.

    QuPath and Bio-Formats write YCbCr under a tag that says RGB: the headers rule there.

    Args:
        tables: the level's JPEGTables.
        data: one tile.
        samples, ycbcr: by the tags, components per px, and whether they are YCbCr, not RGB or grey.
        factors: by how much the tags say that chroma is coarser, across and down.

    Raises:
        ValueError: the tile is not JPEG.
    """
    _check_start(data)
    parts = segments(data)
    frame = next((segment for marker, segment in parts if marker == _SOF0 or marker in _OTHER_FRAMES), None)
    if frame is None or len(frame) < 10 or len(frame) < 10 + 3 * frame[9]:
        raise ValueError("no frame in its header")
    if frame[9] != samples:
        return f"its JPEG data have {frame[9]} components, its tags {samples} samples"
    if samples == 1:
        return ycbcr
    adobe = next((p[15] for m, p in segments(tables or SOI) + parts if m == _APP14 and p[4:9] == b"Adobe"), None)
    marked = any(marker == _APP0 for marker, _ in parts)  # JFIF has no RGB
    each = [(f >> 4, f & 15) for f in frame[11 : 10 + 3 * samples : 3]]
    by_headers = adobe != 0 and (adobe == 1 or marked or each[0] != each[1])
    if ycbcr and not by_headers and (adobe == 0 or factors != (1, 1)):
        return "its JPEG data are RGB, its tags say YCbCr"
    return ycbcr or by_headers


@dataclass(frozen=True)
class StreamHeader:
    """Header before the scan data of a baseline JPEG stream.

    Attributes:
        stream: the bytes up to the scan data, which begin at its length.
        frame: where the frame header (SOF0) starts in them.
        mcu_width, mcu_height: px of a minimum coded unit.
        interval: MCUs per restart segment; 0 when the stream has none.
    """

    stream: bytes
    frame: int
    mcu_width: int
    mcu_height: int
    interval: int

    @classmethod
    def parse(cls, stream: bytes) -> Self:
        """Read the header of ``stream``, which may go on behind it.

        Raises:
            OtherJpeg: not baseline.
            ValueError: not a JPEG stream of 3 components, or its header is longer than ``stream``.
        """
        _check_start(stream)
        frame, interval, factors, at = -1, 0, b"", 2
        parts = segments(stream)
        for marker, segment in parts:
            if marker in _OTHER_FRAMES:
                raise OtherJpeg(f"frame of kind {marker:#04x} is not baseline")
            if marker == _SOF0:
                frame, factors = at, segment[11::3]
            elif marker == _DRI:
                interval = int.from_bytes(segment[4:6], "big")
            at += len(segment)
        if frame < 0 or len(factors) != 3 or not parts or parts[-1][0] != _SOS:
            raise ValueError("no frame of 3 components, or no scan, in its header")
        if not all(1 <= f >> 4 <= 4 and 1 <= f & 15 <= 4 for f in factors):
            raise ValueError(f"sampling factors {factors.hex(' ')}; they are 1 to 4")
        mcu_width, mcu_height = 8 * max(f >> 4 for f in factors), 8 * max(f & 15 for f in factors)
        return cls(stream[:at], frame, mcu_width, mcu_height, interval)

    def resized(self, width: int, height: int) -> bytes:
        """Return the header of an image of another size: JPEG keeps it in 16 bits per side."""
        if max(width, height) > 0xFFFF:
            raise ValueError(f"a JPEG image has at most 65535 px per side; got {width} x {height}")
        at = self.frame + 5
        return self.stream[:at] + height.to_bytes(2, "big") + width.to_bytes(2, "big") + self.stream[at + 4 :]


def _check_start(data: bytes) -> None:
    if data[:2] != SOI:
        raise ValueError(f"not JPEG data: it begins with {data[:4].hex(' ') or 'nothing'}")


def decode(stream: bytes, out: Pixels) -> None:
    """Decode a whole JPEG stream into ``out``: uint8 (height, width, 3), contiguous.

    Raises:
        ValueError: the stream is damaged, warnings of the decoder included, or has another size than ``out``.
    """
    decoded = simplejpeg.decode_jpeg(stream, "RGB", buffer=out)
    if decoded.shape != out.shape:
        raise ValueError(f"{decoded.shape[1]} x {decoded.shape[0]} px instead of {out.shape[1]} x {out.shape[0]}")


def segments(stream: bytes) -> list[tuple[int, bytes]]:
    """Marker code and bytes (marker and length included) of each segment up to and including the first scan header.

    Raises:
        ValueError: the bytes are not JPEG segments.
    """
    marked: list[tuple[int, bytes]] = []
    at = 2
    while at + 4 <= len(stream) and stream[at] == 0xFF:
        marker, end = stream[at + 1], at + 2 + int.from_bytes(stream[at + 2 : at + 4], "big")
        if marker == EOI[1]:
            break
        if end > len(stream) or end < at + 4:
            raise ValueError(f"JPEG segment {marker:#04x} of {end - at} bytes does not fit into {len(stream)} bytes")
        marked.append((marker, stream[at:end]))
        if marker == _SOS:
            break
        at = end
    return marked


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
    **dict.fromkeys((8, 32946), lambda data, size: imagecodecs.zlib_decode(data, out=size)),
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
        return functools.partial(_decode_jpeg2000, samples)
    if compression in _UNPACK and page.number(Tag.PREDICTOR, 1) in (1, _DIFFERENCED):
        is_differenced = page.number(Tag.PREDICTOR, 1) == _DIFFERENCED
        return functools.partial(_unpack, _UNPACK[compression], samples, is_differenced)
    return f"compression {compression} with predictor {page.number(Tag.PREDICTOR, 1)} is not read"


def _unpack(
    unpacker: Callable[[bytes, int], bytes | bytearray], samples: int, is_differenced: bool, data: bytes, out: Pixels
) -> None:
    """Decode a tile that is plain samples once unpacked."""
    size = out.shape[0] * out.shape[1] * samples
    try:
        raw = unpacker(data, size)
    except RuntimeError as error:
        raise ValueError(str(error)) from error
    if len(raw) != size:
        raise ValueError(f"{len(raw)} bytes of pixels instead of {size}")
    pixels = np.frombuffer(raw, np.uint8).reshape(*out.shape[:2], samples)
    if not is_differenced:
        out[...] = pixels
    elif samples == 3:
        np.cumsum(pixels, axis=1, dtype=np.uint8, out=out)
    else:
        out[...] = np.cumsum(pixels, axis=1, dtype=np.uint8)


def _decode_jpeg2000(samples: int, data: bytes, out: Pixels) -> None:
    # The decoder allocates what the SIZ marker asks for (ITU-T T.800, A.5.1), so that is read first.
    at = data.find(_CODESTREAM)
    if at < 0 or len(data) < at + 42:
        raise ValueError("no JPEG 2000 codestream")
    right, bottom, left, top, part_width, part_height, _, _, stored = struct.unpack_from(">8IH", data, at + 8)
    size, parts = (bottom - top, right - left), right * bottom / max(1, part_width * part_height)
    shape = (*out.shape[:2], samples)
    if (*size, stored) != shape or parts > _MAX_PARTS:
        raise ValueError(
            f"a JPEG 2000 stream of {size[1]} x {size[0]} px, {stored} samples and {parts:.0f} parts instead of "
            f"{out.shape[1]} x {out.shape[0]} px and {samples} samples"
        )
    try:
        pixels = imagecodecs.jpeg2k_decode(data)
    except RuntimeError as error:
        raise ValueError(str(error)) from error
    pixels = pixels.reshape(*pixels.shape[:2], -1)
    if pixels.shape != shape or pixels.dtype != np.uint8:
        raise ValueError(f"{pixels.dtype} {pixels.shape} instead of uint8 {shape}")
    out[...] = pixels
