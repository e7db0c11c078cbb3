"""Writes an NDPI file from pixels: what Hamamatsu's scanners write, as far as readers look at it.

One JPEG stream with restart markers, their starts in a private tag, 8-byte directory offsets, and behind the directory
the upper halves of all values, so that the stream may lie above 4 GiB (the hole before it takes no disk).
"""

from __future__ import annotations

import io
import struct
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

SHORT, LONG, RATIONAL, SIGNED_LONG, FLOAT = 3, 4, 5, 9, 11


def write_ndpi(
    path: Path,
    pixels: NDArray[np.uint8],
    *,
    interval: int,
    subsampling: str = "4:2:2",
    hole_bytes: int = 0,
    with_starts: bool = True,
) -> None:
    """Write one level; ``interval`` in MCUs, ``hole_bytes`` between the file's head and the stream."""
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "JPEG", quality=85, subsampling=subsampling, restart_marker_blocks=interval)
    stream = buffer.getvalue()
    scan = stream.index(b"\xff\xda")
    scan += 2 + int.from_bytes(stream[scan + 2 : scan + 4], "big")
    restarts = [i + 2 for i in range(scan, len(stream) - 1) if stream[i] == 0xFF and 0xD0 <= stream[i + 1] <= 0xD7]
    starts = np.array([scan, *restarts], "<u4")

    start = 16 + hole_bytes
    extra = start + len(stream)
    resolution, focus = extra, extra + 8
    table = focus + 8
    entries = [
        (256, LONG, 1, pixels.shape[1]),
        (257, LONG, 1, pixels.shape[0]),
        (258, SHORT, 1, 8),
        (259, SHORT, 1, 7),
        (262, SHORT, 1, 6),
        (271, 2, 1, 0),
        (273, LONG, 1, start),
        (277, SHORT, 1, 3),
        (278, LONG, 1, pixels.shape[0]),
        (279, LONG, 1, len(stream)),
        (282, RATIONAL, 1, resolution),
        (283, RATIONAL, 1, resolution),
        (296, SHORT, 1, 3),
        (65420, SHORT, 1, 1),
        (65421, FLOAT, 1, int.from_bytes(struct.pack("<f", 20.0), "little")),
        (65424, SIGNED_LONG, 1, 0),
    ]
    if with_starts:
        entries.append((65426, LONG, len(starts), table))
    directory = table + starts.nbytes
    with path.open("wb") as file:
        file.write(b"II*\0" + struct.pack("<Q", directory))
        file.seek(start)
        file.write(stream)
        file.write(struct.pack("<II", 20_000, 1) + bytes(8) + starts.tobytes())
        file.write(struct.pack("<H", len(entries)))
        for tag, kind, count, value in entries:
            file.write(struct.pack("<HHII", tag, kind, count, value & 0xFFFFFFFF))
        file.write(bytes(8))
        for *_, value in entries:
            file.write(struct.pack("<I", value >> 32))
