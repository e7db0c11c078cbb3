"""The um/px of a slide's level 0: what the file says, unless the user says otherwise, and only if it is plausible.

Takes the values a backend found (per axis, None where the file is silent) and the user's override; gives one number or
one error that names the override. Pixels are square to us: axes that differ by up to 5% are averaged, as QuPath does.
"""

from __future__ import annotations

from pathlib import Path

from pipelines.slides.geometry import MPP_MAX, MPP_MIN, check_mpp
from pipelines.slides.slide import SlideError

AXES_TOLERANCE = 0.05
"""Largest relative difference of the x and y mpp that is still taken for square pixels."""

OVERRIDE = "give it with --slide-mpp, or per slide in the column `mpp` of the CSV"


def level0_mpp(path: Path, mpp_x: float | None, mpp_y: float | None, override: float | None) -> float:
    """um/px of level 0.

    Args:
        path: the slide, for the error.
        mpp_x, mpp_y: um/px that the file records; None: not recorded.
        override: um/px that the user gave, used in place of the file's; None: not given.

    Raises:
        ValueError: ``override`` is implausible.
        SlideError: no override, and the file's values are missing, implausible or not square.
    """
    if override is not None:
        if not check_mpp(override):
            raise ValueError(f"the mpp given for {path} must be {MPP_MIN:g} to {MPP_MAX:g} um/px; got {override:g}")
        return float(override)
    found_x, found_y = mpp_x if mpp_x is not None else mpp_y, mpp_y if mpp_y is not None else mpp_x
    if found_x is None or found_y is None:
        raise SlideError(f"{path}: the file does not record its um/px (mpp); {OVERRIDE}")
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
