"""Files and metadata of a Zarr slide, checked before the Zarr library sees them.

Takes the path of a slide; gives a ``ZarrStore``, a folder or a server, and its arrays. A key is a path below the root.
Bounds what a chunk may take once decompressed.
"""

from __future__ import annotations

import bz2
import json
import lzma
import math
import stat
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import imagecodecs
import zarr
import zarr.storage
from zarr.codecs import BloscCodec, GzipCodec, ZstdCodec

from pipelines.backends.tiff_page import MAX_SIDE
from pipelines.slides.slide import NotThisFormat, SlideError, url_of

if TYPE_CHECKING:
    from pipelines.backends.remote_zarr import RemoteFolder

NO_FILE: Final = -1
"""In place of a size: something else than a file lies there."""

JSON_BYTES: Final = 16 << 20
"""Metadata have at most."""

_MEMBERS_NAMED: Final = 8


class ZarrFolder:
    """The files of one slide in a folder on a disk. Its text is what an error calls it by.

    Attributes:
        files: as the Zarr library takes them.
        most_bytes: received of one file at most, by ``RemoteFolder``: metadata, then a chunk of the slide as well.
    """

    def __init__(self, root: Path) -> None:
        self._root, self.most_bytes = root, JSON_BYTES
        self.files = zarr.storage.LocalStore(root, read_only=True)

    def __str__(self) -> str:
        return str(self._root)

    def sizes(self, keys: Sequence[str]) -> list[int | None]:
        """Return the bytes of each file; None where there is none, ``NO_FILE`` where something else is."""
        return [self._size(key) for key in keys]

    def _size(self, key: str) -> int | None:
        try:
            status = (self._root / key).stat()
        except (FileNotFoundError, NotADirectoryError):
            return None
        return status.st_size if stat.S_ISREG(status.st_mode) else NO_FILE

    def read(self, key: str) -> bytes:
        return (self._root / key).read_bytes()

    def members(self) -> str:
        """Return names of what lies in the root, for a message."""
        return ", ".join(sorted(child.name for child in self._root.iterdir() if child.is_dir())[:_MEMBERS_NAMED])

    def close(self) -> None:
        """Do nothing: no file is held open."""


ZarrStore: TypeAlias = "ZarrFolder | RemoteFolder"


def open_store(path: Path) -> ZarrStore:
    """Return the store of the slide at ``path``, which the caller closes.

    Raises:
        NotThisFormat: neither a folder nor a URL.
        SlideError: what reads a URL is not installed.
    """
    if path.is_dir():
        return ZarrFolder(path)
    url = url_of(path)
    if url is None:
        raise NotThisFormat(f"{path}: not a folder")
    from pipelines.backends.remote_zarr import open_remote  # fsspec is loaded for slides behind a URL alone

    return open_remote(url)


def key_of(path: str, name: str) -> str:
    """Return the key of a file in the group or array at ``path``."""
    return str(PurePosixPath(path, name))


def holds(store: ZarrStore, *keys: str) -> list[bool]:
    """Return which of the keys are files."""
    return [size is not None and size != NO_FILE for size in store.sizes(keys)]


V2_COMPRESSORS: Final = frozenset({"blosc", "bz2", "gzip", "lz4", "lzma", "zlib", "zstd"})
V2_FILTERS: Final = frozenset({"delta", "shuffle"})
V3_CODECS: Final = frozenset({"blosc", "bytes", "crc32c", "gzip", "sharding_indexed", "transpose", "zstd"})
"""What unpacks or reorders bytes. No other codec is run: among them are ones that unpickle what they are given."""

MAX_CHUNK_BYTES: Final = 256 << 20


@dataclass(frozen=True)
class ZarrArray:
    """One array: its path in the store, format (2 or 3), type by name, shape, dimension names, chunks as stored."""

    path: str
    zarr_format: int
    dtype: str
    shape: tuple[int, ...]
    dimension_names: tuple[str, ...] | None
    chunks: tuple[int, ...]
    fill: int | None


def read_json(root: ZarrStore, path: str, name: str) -> dict[str, Any]:
    """Return a JSON object of the store, which is read only where it can be metadata."""
    key = key_of(path, name)
    size = root.sizes([key])[0]
    if size is not None and size > JSON_BYTES:
        raise SlideError(f"{root}: {path}/{name} has {size} bytes; metadata have {JSON_BYTES} at most")
    document = json.loads(root.read(key)) if size is not None and size != NO_FILE else None
    if not isinstance(document, dict):
        what = "is absent" if document is None else f"holds a {type(document).__name__}, not an object"
        raise SlideError(
            f"{root}: the Zarr metadata cannot be used ({path or '.'}/{name} {what}); copy the slide again"
        )
    return document


def read_array(root: ZarrStore, path: str) -> ZarrArray:
    """Return the array at ``path``, its codecs allowed and its chunks of a size that can be meant."""
    if path.startswith("/") or ".." in path.split("/"):
        raise SlideError(f"{root}: array {path!r} lies outside the store")
    if holds(root, key_of(path, "zarr.json"))[0]:
        about, zarr_format = read_json(root, path, "zarr.json"), 3
        _allow(root, path, "codec", [_name(codec) for codec in about["codecs"]], V3_CODECS)
        grid, keys = about["chunk_grid"], about["chunk_key_encoding"]
        if _name(grid) != "regular" or _name(keys) not in ("default", "v2") or about.get("storage_transformers"):
            raise SlideError(f"{root}: array {path!r}: only regular chunks under plain keys are read")
        parts, names = [tuple(grid["configuration"]["chunk_shape"])], about.get("dimension_names")
        for sharding in [c for c in about["codecs"] if _name(c) == "sharding_indexed"]:
            inner = sharding["configuration"]
            for key in ("codecs", "index_codecs"):
                allowed = V3_CODECS - {"sharding_indexed"}  # no shards in shards
                _allow(root, path, "codec", [_name(codec) for codec in inner.get(key, ())], allowed)
            parts.append(tuple(inner["chunk_shape"]))
        dtype = _name(about["data_type"])
    else:
        about, zarr_format, names = read_json(root, path, ".zarray"), 2, None
        dtype = about["dtype"] if isinstance(about["dtype"], str) else "structured"
        packed = about.get("compressor")
        _allow(root, path, "compressor", [packed["id"]] if packed else [], V2_COMPRESSORS)
        _allow(root, path, "filter", [kind["id"] for kind in about.get("filters") or ()], V2_FILTERS)
        parts = [tuple(about["chunks"])]
    shape, fill = tuple(about["shape"]), about["fill_value"]
    for sides in (shape, *parts):
        if len(sides) != len(shape) or not all(type(n) is int and 1 <= n <= MAX_SIDE for n in sides):
            raise SlideError(
                f"{root}: array {path!r} of shape {shape} has chunks {parts}; sides are whole numbers from 1 to "
                f"{MAX_SIDE}"
            )
    if math.prod(parts[-1]) > MAX_CHUNK_BYTES:
        raise SlideError(
            f"{root}: array {path!r} has chunks of {math.prod(parts[-1]) >> 20} MiB {parts[-1]}; at most "
            f"{MAX_CHUNK_BYTES >> 20} MiB are decoded at once; write it with smaller chunks"
        )
    named = tuple(map(str, names)) if names and None not in names else None
    return ZarrArray(path, zarr_format, dtype, shape, named, parts[0], fill if type(fill) is int else None)


def _name(extension: Any) -> str:
    """Name of a v3 extension point, which is written as an object or, without settings, as a string."""
    return extension if isinstance(extension, str) else str(extension["name"])


def _allow(root: ZarrStore, path: str, kind: str, names: Sequence[object], allowed: frozenset[str]) -> None:
    for name in names:
        if name not in allowed:
            raise SlideError(
                f"{root}: array {path or '.'!r} asks for the {kind} {str(name)[:60]!r}; of a slide only "
                f"{', '.join(sorted(allowed))} are run, because others may execute code from the file; write it with "
                "one of those"
            )


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
    """Bound a codec of Zarr v3: its decoder gets the shape of the chunk."""
    name = "_decode_sync" if hasattr(codec, "_decode_sync") else "_decode_single"
    decode = getattr(codec, name)

    def bounded(self: Any, data: Any, spec: Any) -> Any:
        refuse_bomb(kind, data.to_bytes(), most_bytes(spec.shape, spec.dtype.to_native_dtype().itemsize))
        return decode(self, data, spec)

    setattr(codec, name, bounded)


for _codec, _kind in ((BloscCodec, "blosc"), (GzipCodec, "gzip"), (ZstdCodec, "zstd")):
    _bound_v3(_codec, _kind)
