"""Pictures of a report: tissue with its tiles, example tiles, and the tint of classes on a picture.

Takes paths of picture files; returns small JPEG pictures as text that a page can hold.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray

from pipelines.slides.slide import Pixels

OVERLAYS = 12
OVERLAY_PX = 320
"""Pictures of tissue on the page, and their longer side: twelve of them stay under half a megabyte."""

COLOURS = ((220, 30, 40), (0, 110, 255), (255, 170, 0), (0, 150, 80), (150, 60, 200), (0, 170, 190))
"""R, G, B of the classes shown, in their order, from the first again where there are more."""

STRONGEST = 0.6
"""Opacity of a class that is certain: the tissue must stay visible below."""


def overlays(paths: Sequence[Path]) -> list[tuple[str, str]]:
    """Return names and base64 JPEGs of some of ``paths``, evenly chosen, without those that cannot be decoded."""
    shown = min(OVERLAYS, len(paths))
    chosen = [paths[i * len(paths) // shown] for i in range(shown)]
    return [(path.stem, jpeg) for path in chosen if (jpeg := small_jpeg(path, OVERLAY_PX))]


def small_jpeg(path: Path, px: int) -> str:
    """Return the picture in ``path``, with sides of at most ``px``, as base64; "" when it cannot be decoded: a report
    is not where that should fail."""
    picture = decoded(path) if path.is_file() else None
    return "" if picture is None else base64.b64encode(as_jpeg(shrunk(picture, px))).decode()


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


def colour_of(number: int) -> tuple[int, int, int]:
    """Return R, G, B of the class shown number ``number``, from 0."""
    return COLOURS[number % len(COLOURS)]


def tinted(pixels: Pixels, probabilities: NDArray[np.uint8]) -> Pixels:
    """Return ``pixels`` (h, w, 3) with each class's colour mixed in by its probability, uint8 (classes, any, any)."""
    height, width = pixels.shape[:2]
    mixed = pixels.astype(np.float32)
    for number, share in enumerate(probabilities):
        shrinks = share.shape[0] > height
        fitted = cv2.resize(share, (width, height), interpolation=cv2.INTER_AREA if shrinks else cv2.INTER_LINEAR)
        opacity = fitted.astype(np.float32)[..., None] * (STRONGEST / 255)
        mixed += opacity * (np.array(colour_of(number), np.float32) - mixed)
    return np.rint(mixed).astype(np.uint8)
