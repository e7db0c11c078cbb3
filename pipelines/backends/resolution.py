"""The um/px of a slide's level 0: what the file says, unless the user says otherwise, and only if it is plausible.

Takes what a backend found per axis and the user's override; gives one number, or one error that names the override.
Pixels are square to us: axes that differ by up to 5% are averaged, as QuPath does.
"""

from __future__ import annotations

from pathlib import Path

from pipelines.slides.geometry import MPP_MAX, MPP_MIN, check_mpp
from pipelines.slides.slide import SlideError

AXES_TOLERANCE = 0.05
"""Largest relative difference of the x and y mpp that is still taken for square pixels."""

OVERRIDE = "give it with --slide-mpp, or per slide in the column `mpp` of --mpp-table FILE"

Recorded = float | str | None
"""um/px that a file records; or what it records instead, as the end of a sentence; None if it records nothing."""


def level0_mpp(path: Path, mpp_x: Recorded, mpp_y: Recorded, override: float | None) -> float:
    """um/px of level 0.

    Args:
        path: the slide, for the error.
        mpp_x, mpp_y: what the file records.
        override: um/px that the user gave, used in place of the file's; None: not given.

    Raises:
        ValueError: ``override`` is implausible.
        SlideError: no override, and the file's values are missing, implausible or not square.
    """
    if override is not None:
        if not check_mpp(override):
            raise ValueError(f"the mpp given for {path} must be {MPP_MIN:g} to {MPP_MAX:g} um/px; got {override:g}")
        return float(override)
    found = [value for value in (mpp_x, mpp_y) if isinstance(value, float | int)]
    if not found:
        unread = next((text for text in (mpp_x, mpp_y) if text), None)
        raise SlideError(f"{path}: the file {unread or 'does not record its um/px (mpp)'}; {OVERRIDE}")
    found_x, found_y = found[0], found[-1]
    if not (check_mpp(found_x) and check_mpp(found_y)):
        bad = found_y if check_mpp(found_x) else found_x
        raise SlideError(
            f"{path}: the file records {bad:g} um/px; a slide has {MPP_MIN:g} to {MPP_MAX:g} um/px (mpp); {OVERRIDE}"
        )
    if abs(found_x - found_y) > AXES_TOLERANCE * min(found_x, found_y):
        raise SlideError(
            f"{path}: the file records {found_x:g} um/px in x and {found_y:g} in y; pixels must be square within "
            f"{AXES_TOLERANCE:.0%}; if one of them is right, {OVERRIDE}"
        )
    return (found_x + found_y) / 2
