"""A bound on what a Zarr chunk unpacks to: a few kilobytes may say that they are gigabytes, or be them.

Takes the codecs of Zarr arrays; makes their decoders refuse chunks that unpack to more than the array's chunks hold.
Sizes that a codec's header records are read there; deflate, bzip2 and LZMA record none that binds, so their data are
unpacked once more, a piece at a time.
"""

from __future__ import annotations

import bz2
import lzma
import math
import zlib
from collections.abc import Callable
from typing import Any, Final

import imagecodecs
import zarr
from zarr.codecs import BloscCodec, GzipCodec, ZstdCodec

_PIECE_BYTES: Final = 1 << 20
_UNPACKERS: Final[dict[str, Callable[[], Any]]] = {
    "gzip": lambda: zlib.decompressobj(zlib.MAX_WBITS | 32),
    "zlib": zlib.decompressobj,
    "bz2": bz2.BZ2Decompressor,
    "lzma": lzma.LZMADecompressor,
}


def most_bytes(shape: tuple[int, ...], item_bytes: int = 1) -> int:
    """Return the bytes that a chunk of ``shape`` may have, packed or not."""
    return 2 * math.prod(shape) * item_bytes + 65536


def refuse_bomb(kind: str, data: bytes, most: int) -> None:
    """Raise ValueError for data that codec ``kind`` would unpack to more than ``most`` bytes.

    Damaged data pass: the decoder refuses them.
    """
    if kind in _UNPACKERS:
        size = _unpacked_bytes(_UNPACKERS[kind], data, most)
    elif kind == "blosc":
        size = int.from_bytes(data[4:8], "little")
    elif kind == "lz4":
        size = int.from_bytes(data[:4], "little")
    elif kind == "zstd":
        size = _zstd_bytes(data, most)
    else:
        return
    if size > most:
        raise ValueError(f"its {len(data)} bytes of {kind} unpack to more than the {most} that a chunk may have")


def _unpacked_bytes(unpacker: Callable[[], Any], data: bytes, most: int) -> int:
    """Return the unpacked size, streams one after the other included; above ``most`` as far as it was counted."""
    total = 0
    try:
        while data and total <= most:
            part = unpacker()
            while not part.eof and total <= most:
                piece = part.decompress(data, _PIECE_BYTES)
                data = getattr(part, "unconsumed_tail", b"")
                total += len(piece)
                if not piece and not data:
                    break
            if not part.eof:
                break
            data = part.unused_data
    except (zlib.error, OSError, lzma.LZMAError, EOFError):
        pass
    return total


def _zstd_bytes(data: bytes, most: int) -> int:
    """Return the content size of the first Zstandard frame (RFC 8878, 3.1.1.1); where it has none, what unpacks."""
    if data[:4] != b"\x28\xb5\x2f\xfd" or len(data) < 6:
        return 0
    flags = data[4]
    single, width = flags >> 5 & 1, (0, 2, 4, 8)[flags >> 6]
    width = 1 if single and not width else width
    at = 5 + (not single) + (0, 1, 2, 4)[flags & 3]
    if width:
        return int.from_bytes(data[at : at + width], "little") + (256 if width == 2 else 0)
    try:
        return len(imagecodecs.zstd_decode(data, out=most))
    except RuntimeError as fault:
        return most + 1 if "too small" in str(fault) else 0


def bound_v2(array: zarr.Array) -> None:
    """Bound the compressor of a Zarr v2 array."""
    compressor = getattr(array.metadata, "compressor", None)
    if compressor is None:
        return
    decode, most = compressor.decode, most_bytes(array.chunks, array.dtype.itemsize)

    def bounded(data: Any, out: Any = None) -> Any:
        refuse_bomb(compressor.codec_id, memoryview(data).tobytes(), most)
        return decode(data, out)

    compressor.decode = bounded


def _bound_v3(codec: Any, kind: str) -> None:
    """Bound a codec of Zarr v3: its decoder is told the shape of the chunk."""
    name = "_decode_sync" if hasattr(codec, "_decode_sync") else "_decode_single"
    decode = getattr(codec, name)

    def bounded(self: Any, data: Any, spec: Any) -> Any:
        refuse_bomb(kind, data.to_bytes(), most_bytes(spec.shape, spec.dtype.to_native_dtype().itemsize))
        return decode(self, data, spec)

    setattr(codec, name, bounded)


for _codec, _kind in ((BloscCodec, "blosc"), (GzipCodec, "gzip"), (ZstdCodec, "zstd")):
    _bound_v3(_codec, _kind)
