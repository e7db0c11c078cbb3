"""The picture of a prediction: the slide's thumbnail, tinted where the model sees a class.

Takes a thumbnail and the probabilities of the classes shown; gives a PNG with a caption and a scale bar.
"""

from __future__ import annotations

import cv2
import numpy as np
from numpy.typing import NDArray

from pipelines.slides.slide import Pixels
from pipelines.tiles.overlay import caption_strip
from pipelines.tiles.tissue import Overview

COLOURS = ((220, 30, 40), (0, 110, 255), (255, 170, 0), (0, 150, 80), (150, 60, 200), (0, 170, 190))
"""R, G, B of the classes shown, in their order, from the first again where there are more."""

STRONGEST = 0.6
"""Opacity of a class that is certain: the tissue must stay visible below."""


def colour_of(number: int) -> tuple[int, int, int]:
    """Return R, G, B of the class shown number ``number``, from 0."""
    return COLOURS[number % len(COLOURS)]


def draw_prediction(thumbnail: Overview, probabilities: NDArray[np.uint8], caption: str) -> bytes:
    """Return a PNG of the slide with the probabilities of its classes.

    Args:
        thumbnail: the slide's bounds.
        probabilities: uint8 (classes shown, h, w), 255 is 1, of the same bounds.
        caption: one line below the picture.
    """
    picture = tinted(thumbnail.pixels, probabilities)
    framed = np.concatenate([picture, caption_strip(picture.shape[1], caption, thumbnail.mpp)])
    done, png = cv2.imencode(".png", cv2.cvtColor(framed, cv2.COLOR_RGB2BGR))
    assert done
    return png.tobytes()


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
