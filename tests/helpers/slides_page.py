"""A page of many slides with pictures beside it, for tests and for looking at."""

from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np

from app.pages.pictures import SmallPicture, slide_rows, write_slides_page
from pipelines.tiles.tile_table import IndexedSlide, TileTable
from pipelines.tiles.tiling import IndexSettings


def write_many(folder: Path, slides: int) -> Path:
    """Write a page of ``slides`` slides: every tenth failed."""
    names = tuple(f"slide <{k:03}>" for k in range(slides) if k % 10 or not k)
    numbers = [int(name[7:10]) for name in names]
    sources = tuple(
        IndexedSlide(
            *(name, 10, None, 0.25, 9000, 8000, "tiled"),
            tissue_share=(k % 50) / 100,
        )
        for name, k in zip(names, numbers, strict=True)
    )
    slide = np.repeat(np.arange(len(names), dtype=np.int32), [5 + 3 * k for k in numbers])
    zeros = np.zeros(len(slide), np.int64)
    table = TileTable(names, slide, zeros, zeros, zeros.astype(np.float32), IndexSettings(tile=512), sources)
    failed = [
        (f"slide <{k:03}>", "open", f"/slides/{k}.svs: the file is cut short\nmore") for k in range(10, slides, 10)
    ]
    pictures = {}
    (folder / "tissue" / "small").mkdir(parents=True)
    noise = np.random.default_rng(0).integers(120, 250, (210, 420, 3), np.uint8)
    for name, k in zip(names, numbers, strict=True):
        path = folder / "tissue" / "small" / f"{name}.jpg"
        picture = cv2.GaussianBlur(np.roll(noise, k, 1), (0, 0), 3)
        path.write_bytes(cv2.imencode(".jpg", picture)[1].tobytes())
        pictures[name] = SmallPicture(path, 420, 210, (1,) if k % 4 == 0 else (), "cut" if k == 1 else "")
    rows = slide_rows(table, failed, pictures)
    return write_slides_page(folder / "slides.html", rows, pictures, ("background", "tumour"), ("300 slides",))
