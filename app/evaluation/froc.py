"""Lesions found at a number of false alarms per slide: the free-response ROC of CAMELYON16.

Takes detections (px and probability) and the true mask of each slide; gives the curve and its score. Rules as in
Ehteshami Bejnordi et al., JAMA 318 (2017), and the challenge's evaluation code: lesions within 75 um of each other are
one, those whose major axis is below 275 um (isolated tumour cells) count neither as found nor as false, a lesion has
the highest probability of the detections in it, and every detection outside is a false alarm. The challenge's code
leaves the lowest threshold out of the curve; here it is in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import cv2
import numpy as np
from numpy.typing import NDArray

from pipelines.tiles.tissue import Mask

MERGED_UM, ISOLATED_UM = 75.0, 275.0
FALSE_POSITIVES = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
"""False alarms per slide at which the score asks for the sensitivity."""

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class SlideHits:
    """What the detections of one slide have hit.

    Attributes:
        lesions: that count.
        found: highest probability in each lesion that was hit.
        false: probability of each detection outside of all lesions.
    """

    lesions: int
    found: tuple[float, ...]
    false: tuple[float, ...]


@dataclass(frozen=True, eq=False)
class Froc:
    """The curve, from the highest threshold to the lowest: false alarms per slide (n,), sensitivity (n,), and the mean
    sensitivity at ``FALSE_POSITIVES``; None without a lesion."""

    false_per_slide: Floats
    sensitivity: Floats
    score: float | None


def hits(mask: Mask, mpp: float, detections: Sequence[tuple[int, int, float]]) -> SlideHits:
    """Return what ``detections`` (x, y, probability) hit on a slide.

    Args:
        mask: bool (h, w), true lesions.
        mpp: um of its px.
    """
    lesions, isolated = _lesions(mask, mpp)
    highest: dict[int, float] = {}
    false = []
    for x, y, probability in detections:
        inside = 0 <= y < mask.shape[0] and 0 <= x < mask.shape[1]
        lesion = int(lesions[y, x]) if inside else 0
        if lesion == 0:
            false.append(probability)
        elif lesion not in isolated:
            highest[lesion] = max(highest.get(lesion, 0.0), probability)
    return SlideHits(int(lesions.max()) - len(isolated), tuple(highest.values()), tuple(false))


def _lesions(mask: Mask, mpp: float) -> tuple[NDArray[np.int32], set[int]]:
    """Number of the lesion at each px, from 1, and those of isolated cells."""
    if not mask.any():
        return np.zeros(mask.shape, np.int32), set()
    distance = cv2.distanceTransform((~mask).view(np.uint8), cv2.DIST_L2, cv2.DIST_MASK_PRECISE)
    near = np.pad((distance < MERGED_UM / mpp / 2) | mask, 1)  # with a rim from which holes cannot be reached
    _, background = cv2.connectedComponents((~near).view(np.uint8), connectivity=4)
    filled = (background != background[0, 0])[1:-1, 1:-1]
    count, labels = cv2.connectedComponents(filled.view(np.uint8), connectivity=8, ltype=cv2.CV_32S)
    isolated = {n for n in range(1, count) if _major_axis(labels == n) * mpp < ISOLATED_UM}
    return labels, isolated


def _major_axis(mask: Mask) -> float:
    """Length of the major axis of the ellipse with the same second moments, px."""
    rows, columns = np.nonzero(mask)
    if not len(rows):
        return 0.0
    spread = np.cov(np.stack([columns, rows]), bias=True) + np.eye(2) / 12  # a px is a square, not a point
    return float(4 * np.sqrt(np.linalg.eigvalsh(spread)[-1]))


def froc(slides: Sequence[SlideHits]) -> Froc:
    """Return the curve over all slides."""
    lesions = sum(slide.lesions for slide in slides)
    found = np.array([p for slide in slides for p in slide.found])
    false = np.array([p for slide in slides for p in slide.false])
    thresholds = np.unique(np.concatenate([found, false]))[::-1]
    alarms = np.array([0.0, *(np.count_nonzero(false >= t) / max(1, len(slides)) for t in thresholds)])
    if not lesions:
        return Froc(alarms, np.zeros(len(alarms)), None)
    sensitivity = np.array([0.0, *(np.count_nonzero(found >= t) / lesions for t in thresholds)])
    return Froc(alarms, sensitivity, float(np.mean(np.interp(FALSE_POSITIVES, alarms, sensitivity))))
