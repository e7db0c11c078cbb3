"""Lesions found at a number of false alarms per slide: the free-response ROC of CAMELYON16.

Takes detections (px and probability) and the true mask of each slide; returns the curve and its score. Rules as in
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
    """Lesions that the detections of one slide hit.

    Attributes:
        lesions: that count.
        found: highest probability in each lesion that was hit.
        false: probability of each detection outside of all lesions.
        isolated: lesions that do not count, as they are too small.
        objects: connected areas of the true mask, before those near each other are merged.
        detections: all of them.
    """

    lesions: int
    found: tuple[float, ...]
    false: tuple[float, ...]
    isolated: int = 0
    objects: int = 0
    detections: int = 0


@dataclass(frozen=True, eq=False)
class Froc:
    """The curve, from the highest threshold to the lowest.

    Attributes:
        false_per_slide, sensitivity: (n,) false alarms per slide, and part of the lesions found.
        score: mean sensitivity at ``FALSE_POSITIVES``; None where the curve means nothing.
        lesions, detections: of all slides.
        reason: why the curve means nothing; empty where it does.
    """

    false_per_slide: Floats
    sensitivity: Floats
    score: float | None
    lesions: int
    detections: int
    reason: str = ""


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
    objects, _ = cv2.connectedComponents(mask.view(np.uint8), connectivity=8)
    counts = len(isolated), objects - 1, len(detections)
    return SlideHits(int(lesions.max()) - len(isolated), tuple(highest.values()), tuple(false), *counts)


def _lesions(mask: Mask, mpp: float) -> tuple[NDArray[np.int32], set[int]]:
    """Number of the lesion at each px, from 1, and those of isolated cells."""
    if not mask.any():
        return np.zeros(mask.shape, np.int32), set()
    distance = cv2.distanceTransform((~mask).view(np.uint8), cv2.DIST_L2, cv2.DIST_MASK_PRECISE)
    near = np.pad((distance < MERGED_UM / mpp / 2) | mask, 1)  # with a rim from which holes cannot be reached
    _, background = cv2.connectedComponents((~near).view(np.uint8), connectivity=4)
    filled = (background != background[0, 0])[1:-1, 1:-1]
    _, labels = cv2.connectedComponents(filled.view(np.uint8), connectivity=8, ltype=cv2.CV_32S)
    isolated = np.flatnonzero(_major_axes(labels) * mpp < ISOLATED_UM) + 1
    return labels, set(isolated.tolist())


def _major_axes(labels: NDArray[np.int32]) -> Floats:
    """Return the major axis, px, of the ellipse with the second moments of each label from 1; each px is visited once
    for all labels."""
    rows, columns = np.nonzero(labels)
    label = labels[rows, columns] - 1
    count = np.bincount(label).astype(np.float64)
    x, y = (axis - (np.bincount(label, axis) / count)[label] for axis in (columns, rows))
    xx, yy, xy = (np.bincount(label, product) / count for product in (x * x, y * y, x * y))
    xx, yy = xx + 1 / 12, yy + 1 / 12  # a px is a square, not a point
    longest: Floats = 4 * np.sqrt((xx + yy) / 2 + np.sqrt(((xx - yy) / 2) ** 2 + xy**2))
    return longest


def froc(slides: Sequence[SlideHits]) -> Froc:
    """Return the curve over all slides; it means nothing without a lesion, and where most objects are merged, as nuclei
    are: a hit anywhere then finds all of them."""
    lesions = sum(slide.lesions for slide in slides)
    found = np.sort([p for slide in slides for p in slide.found])
    false = np.sort([p for slide in slides for p in slide.false])
    thresholds = np.unique(np.concatenate([found, false]))[::-1]
    alarms = np.array([0.0, *((len(false) - np.searchsorted(false, thresholds)) / max(1, len(slides)))])
    sensitivity = np.array([0.0, *((len(found) - np.searchsorted(found, thresholds)) / max(1, lesions))])
    objects, kept = sum(slide.objects for slide in slides), lesions + sum(slide.isolated for slide in slides)
    reason = ""
    if not lesions:
        reason = f"no lesion of {ISOLATED_UM:g} um or more"
    elif 2 * kept < objects:
        reason = f"{objects} annotated objects merge into {kept}, those within {MERGED_UM:g} um being one lesion"
    score = None if reason else float(np.mean(np.interp(FALSE_POSITIVES, alarms, sensitivity)))
    return Froc(alarms, sensitivity, score, lesions, sum(slide.detections for slide in slides), reason)
