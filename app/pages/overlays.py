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
    picture: Any = cv2.imdecode(np.fromfile(path, np.uint8), cv2.IMREAD_COLOR) if path.stat().st_size else None
    if picture is None:
        return ""
    scale = min(1.0, OVERLAY_PX / max(picture.shape[:2]))
    size = (max(1, round(picture.shape[1] * scale)), max(1, round(picture.shape[0] * scale)))
    small = cv2.resize(picture, size, interpolation=cv2.INTER_AREA)
    return base64.b64encode(cv2.imencode(".jpg", small, [cv2.IMWRITE_JPEG_QUALITY, 80])[1].tobytes()).decode()
