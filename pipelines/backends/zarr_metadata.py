"""The metadata of a Zarr array, read and judged before the Zarr library sees it.

Takes a store and a path in it; gives a ``ZarrArray``. Metadata is JSON written by anyone, and a Zarr library runs the
codecs that it names, some of which unpickle: so only the codecs listed here are let through, and only chunks of a size
that can be meant. Follows Zarr v2 and v3.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from pipelines.backends.zarr_store import JSON_BYTES, NO_FILE, ZarrStore, holds, key_of
from pipelines.slides.slide import SlideError

V2_COMPRESSORS: Final = frozenset({"blosc", "bz2", "gzip", "lz4", "lzma", "zlib", "zstd"})
V2_FILTERS: Final = frozenset({"delta", "shuffle"})
V3_CODECS: Final = frozenset({"blosc", "bytes", "crc32c", "gzip", "sharding_indexed", "transpose", "zstd"})
"""What unpacks or reorders bytes. No other codec is run: among them are ones that unpickle what they are given."""

MAX_CHUNK_BYTES: Final = 256 << 20
MAX_SIDE: Final = 1 << 24


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
