"""Writes an MRXS slide from pixels: what 3DHISTECH's scanners write, as far as readers look at it.

The camera's positions are in a record of their own, and the scan begins away from the corner of level 0. Laid out as
OpenSlide reads it (its format page of MIRAX): ``Slidedat.ini``, pages of tile records in ``Index.dat``, the tiles in
``Data0000.dat``.
"""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import simplejpeg
from numpy.typing import NDArray

from pipelines.slides.geometry import Bounds

IMAGE_PX = 64
SLIDE_ID = "a1b2"
LEVELS = 3


def write_mrxs(path: Path, pixels: NDArray[np.uint8], bounds: Bounds, mpp: float = 0.25) -> list[NDArray[np.uint8]]:
    """Write the part of ``pixels`` that lies in ``bounds``, and return the levels that a reader has to see.

    Args:
        path: ends in ``.mrxs``; the data folder lies beside it.
        pixels: uint8 (height, width, 3), sides multiples of ``IMAGE_PX << LEVELS - 1``.
        bounds: width and height are such multiples; x and y are such multiples, plus a shift in (0, ``IMAGE_PX``) of
            all camera positions that the coarsest level can show: a multiple of ``1 << LEVELS - 1``.
        mpp: um/px.

    Returns:
        Levels as a reader has to see them, white where there is no tile.
    """
    across, down = pixels.shape[1] // IMAGE_PX, pixels.shape[0] // IMAGE_PX
    shift = bounds.l0_x % IMAGE_PX, bounds.l0_y % IMAGE_PX
    folder = path.with_suffix("")
    folder.mkdir()
    path.write_bytes(simplejpeg.encode_jpeg(np.ascontiguousarray(pixels[::16, ::16])))  # a preview, which nobody reads
    data, pages, seen = bytearray(), [], []
    for level in range(LEVELS):
        concat = 1 << level
        scaled = np.ascontiguousarray(pixels[::concat, ::concat])
        shown = np.full_like(scaled, 255)
        records = b""
        for y in range((bounds.l0_y - shift[1]) // IMAGE_PX, (bounds.l0_y + bounds.height) // IMAGE_PX, concat):
            for x in range((bounds.l0_x - shift[0]) // IMAGE_PX, (bounds.l0_x + bounds.width) // IMAGE_PX, concat):
                left, top = (x * IMAGE_PX + shift[0]) // concat, (y * IMAGE_PX + shift[1]) // concat
                window = np.s_[top : top + IMAGE_PX, left : left + IMAGE_PX]
                stream = simplejpeg.encode_jpeg(np.ascontiguousarray(scaled[window]), 90)
                shown[window] = simplejpeg.decode_jpeg(stream)
                records += struct.pack("<4i", y * across + x, len(data), len(stream), 0)
                data += stream
        pages.append(struct.pack("<2i", len(records) // 16, 0) + records)
        seen.append(shown)
    positions = b"".join(
        struct.pack("<bii", 0, x * IMAGE_PX + shift[0], y * IMAGE_PX + shift[1])
        for y in range(down)
        for x in range(across)
    )
    positions_page = struct.pack("<7i", 1, 0, 0, 0, len(data), len(positions), 0)
    (folder / "Data0000.dat").write_bytes(bytes(data) + positions)
    (folder / "Index.dat").write_bytes(_index(pages, positions_page))
    (folder / "Slidedat.ini").write_text(_slidedat(across, down, mpp))
    return seen


def _index(pages: list[bytes], positions_page: bytes) -> bytes:
    """Head, table of levels and table of other records, each entry of which leads to a page."""
    head = b"01.02" + SLIDE_ID.encode()
    tables = len(head) + 8
    heads_at = tables + 4 * (len(pages) + 1)
    pages_at = heads_at + 8 * (len(pages) + 1)
    heads, bodies = b"", b""
    for page in [*pages, positions_page]:
        heads += struct.pack("<2i", 0, pages_at + len(bodies))
        bodies += page
    entries = struct.pack(f"<{len(pages) + 1}i", *(heads_at + 8 * i for i in range(len(pages) + 1)))
    return head + struct.pack("<2i", tables, tables + 4 * len(pages)) + entries + heads + bodies


def _slidedat(across: int, down: int, mpp: float) -> str:
    hierarchical = {
        "HIER_COUNT": 1,
        "NONHIER_COUNT": 1,
        "INDEXFILE": "Index.dat",
        "HIER_0_NAME": "Slide zoom level",
        "HIER_0_COUNT": LEVELS,
        **{f"HIER_0_VAL_{i}_SECTION": f"LAYER_0_LEVEL_{i}_SECTION" for i in range(LEVELS)},
        "NONHIER_0_NAME": "VIMSLIDE_POSITION_BUFFER",
        "NONHIER_0_COUNT": 1,
        "NONHIER_0_VAL_0": "default",
        "NONHIER_0_VAL_0_SECTION": "NONHIERLAYER_0_SECTION",
    }
    levels = {
        f"LAYER_0_LEVEL_{i}_SECTION": {
            "IMAGE_CONCAT_FACTOR": min(i, 1),
            "OVERLAP_X": 0,
            "OVERLAP_Y": 0,
            "MICROMETER_PER_PIXEL_X": mpp * 2**i,
            "MICROMETER_PER_PIXEL_Y": mpp * 2**i,
            "IMAGE_FILL_COLOR_BGR": 0xFFFFFF,
            "DIGITIZER_WIDTH": IMAGE_PX,
            "DIGITIZER_HEIGHT": IMAGE_PX,
            "IMAGE_FORMAT": "JPEG",
        }
        for i in range(LEVELS)
    }
    general = {
        "SLIDE_ID": SLIDE_ID,
        "IMAGENUMBER_X": across,
        "IMAGENUMBER_Y": down,
        "OBJECTIVE_MAGNIFICATION": 20,
        "CameraImageDivisionsPerSide": 1,
    }
    groups = {
        "GENERAL": general,
        "HIERARCHICAL": hierarchical,
        "DATAFILE": {"FILE_COUNT": 1, "FILE_0": "Data0000.dat"},
        **levels,
    }
    return "".join(f"[{name}]\n" + "".join(f"{k} = {v}\n" for k, v in keys.items()) for name, keys in groups.items())
