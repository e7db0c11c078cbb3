"""Pictures of tissue and tiles for a report: a dozen small ones of all that the run folder has.

Takes paths of PNG files; gives small JPEG pictures as text that a page can hold.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cv2
import numpy as np

from pipelines.slides.slide import Pixels

OVERLAYS = 12
OVERLAY_PX = 320
"""Pictures of tissue on the page, and their longer side: twelve of them stay under half a megabyte."""


def overlays(paths: Sequence[Path]) -> list[tuple[str, str]]:
    """Return names and base64 JPEGs of some of ``paths``, evenly chosen, without those that cannot be decoded."""
    shown = min(OVERLAYS, len(paths))
    chosen = [paths[i * len(paths) // shown] for i in range(shown)]
    return [(path.stem, jpeg) for path in chosen if (jpeg := _thumbnail(path))]


def _thumbnail(path: Path) -> str:
    """The picture as a small base64 JPEG; empty when it cannot be decoded: a report is not where that should fail."""
    picture = decoded(path)
    return "" if picture is None else base64.b64encode(as_jpeg(shrunk(picture, OVERLAY_PX))).decode()


def decoded(path: Path) -> Pixels | None:
    """Return the picture in ``path`` as uint8 (h, w, 3), BGR; None where it cannot be decoded."""
    picture: Any = cv2.imdecode(np.fromfile(path, np.uint8), cv2.IMREAD_COLOR) if path.stat().st_size else None
    return None if picture is None else picture.astype(np.uint8, copy=False)


def shrunk(picture: Pixels, px: int) -> Pixels:
    """Return a picture with sides of at most ``px``."""
    scale = min(1.0, px / max(picture.shape[:2]))
    size = (max(1, round(picture.shape[1] * scale)), max(1, round(picture.shape[0] * scale)))
    small: Pixels = cv2.resize(picture, size, interpolation=cv2.INTER_AREA).astype(np.uint8, copy=False)
    return small


def as_jpeg(picture: Pixels) -> bytes:
    """Return a BGR picture as a JPEG."""
    return cv2.imencode(".jpg", picture, [cv2.IMWRITE_JPEG_QUALITY, 80])[1].tobytes()
