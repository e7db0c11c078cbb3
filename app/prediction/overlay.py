"""The picture of a prediction: the slide's thumbnail, tinted where the model sees a class.

Takes a thumbnail and the probabilities of the classes shown; returns a PNG with a caption and a scale bar.
"""

from __future__ import annotations

import cv2
import numpy as np
from numpy.typing import NDArray

from app.pages.overlays import tinted
from pipelines.tiles.overlay import caption_strip
from pipelines.tiles.tissue import Overview


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
