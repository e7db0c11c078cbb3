"""``python -m app.convert IN OUT``: one annotation file from another.

Takes a GeoJSON, an ASAP or ImageScope XML or a mask (TIFF, PNG), gives any other of them; what OUT is, its suffix says.
Masks need the slide, for its size and resolution.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from app.settings.cli import run_command
from pipelines.backends.registry import open_slide
from pipelines.labels.annotation_files import DRAWING_SUFFIXES, MASK_SUFFIXES, XML_SUFFIX
from pipelines.labels.conversion import read_areas, write_area_mask, write_areas
from pipelines.labels.drawing import Drawing, Origin
from pipelines.slides.geometry import MPP_MAX, MPP_MIN, check_mpp
from pipelines.slides.slide import Slide


@dataclass(frozen=True)
class ConvertCommand:
    """Turn an annotation file into another format."""

    source: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="IN")]
    """What is read: .geojson or .json, .xml of ASAP or ImageScope, or a mask, .tif, .tiff or .png."""
    target: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="OUT")]
    """What is made, by its suffix; must not exist. The ids of a mask are written to classes.txt in its folder."""
    slide: Path | None = None
    """The slide that was drawn on. Masks need it, and so do slides whose scan does not begin at the corner of level 0
    (MRXS): QuPath counts from the scan, ASAP and ImageScope from level 0."""
    mpp: float | None = None
    """um/px of the mask that is made. Default: that of the slide's level 0."""
    slide_mpp: float | None = None
    """um/px of level 0, instead of what the slide's file says."""
    xml: Literal["asap", "imagescope"] = "asap"
    """Which program an .xml is made for."""

    def validate(self) -> list[str]:
        known = (*DRAWING_SUFFIXES, *MASK_SUFFIXES)
        faults = [
            f"{name} must end in {', '.join(known)}; got {path}"
            for name, path in (("IN", self.source), ("OUT", self.target))
            if path.suffix.lower() not in known
        ]
        masks = [str(path) for path in (self.source, self.target) if path.suffix.lower() in MASK_SUFFIXES]
        rules = [
            (self.source.is_file(), f"IN must be an annotation file; {self.source} is none. Check the path"),
            (not self.target.exists(), f"OUT must not exist; {self.target} does. Remove it, or choose another name"),
            (not masks or self.slide is not None, f"{' and '.join(masks)}: a mask covers a slide: give --slide FILE"),
            (
                self.mpp is None or (check_mpp(self.mpp) and self.target.suffix.lower() in MASK_SUFFIXES),
                f"--mpp is the resolution of a mask that is made, {MPP_MIN:g} to {MPP_MAX:g} um/px; got {self.mpp} for "
                f"{self.target}",
            ),
            (
                self.slide_mpp is None or check_mpp(self.slide_mpp),
                f"--slide-mpp is {MPP_MIN:g} to {MPP_MAX:g} um/px; got {self.slide_mpp}",
            ),
        ]
        return faults + [fault for holds, fault in rules if not holds]


def convert(command: ConvertCommand) -> None:
    """Read, write, and say what there was."""
    with contextlib.ExitStack() as opened:
        slide = (
            None if command.slide is None else opened.enter_context(open_slide(command.slide, mpp=command.slide_mpp))
        )
        drawing = read_areas(command.source, slide)
        suffix = command.target.suffix.lower()
        command.target.parent.mkdir(parents=True, exist_ok=True)
        if suffix in MASK_SUFFIXES:
            assert slide is not None
            size = write_area_mask(drawing, command.target, slide, command.mpp or slide.mpp)
            made = f"{size.width} x {size.height} px at {command.mpp or slide.mpp:g} um/px"
        else:
            file_format = command.xml if suffix == XML_SUFFIX else "geojson"
            write_areas(drawing, command.target, file_format, slide)
            made = file_format
            _say_of_bounds(drawing, file_format, slide)
    left_out = "".join(f"; left out: {count} x {kind}" for kind, count in drawing.left_out.items())
    print(
        f"{command.target}: {made}, {len(drawing.box)} polygons of {len(drawing.start)} points, "
        f"classes {', '.join(drawing.classes) or 'none'}{left_out}"
    )


def _say_of_bounds(drawing: Drawing, file_format: str, slide: Slide | None) -> None:
    if slide is None and (drawing.origin is Origin.BOUNDS) != (file_format == "geojson"):
        print(
            "no --slide given: taken for one whose scan begins at the corner of level 0 (that of MRXS and SCN may not)"
        )


def main(argv: Sequence[str] | None = None) -> int:
    return run_command(ConvertCommand, convert, argv, prog="python -m app.convert")


if __name__ == "__main__":
    sys.exit(main())
