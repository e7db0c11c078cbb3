"""``python -m app.convert IN OUT``: GeoJSON or masks from annotation files, one or a folder of them.

Takes a GeoJSON, an ASAP or ImageScope XML, a mask (TIFF, PNG) or a DICOM Segmentation; the suffix of OUT, and ``--to``
for a folder, says what is made. Masks need the slide, for its size and resolution.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import tyro

from app.settings.cli import FAILED, OK, run_command
from app.settings.fields import broken
from app.settings.run import OpeningSettings, mpp_errors, slides_in
from pipelines.catalog.catalog import SlideNames, SlideSpec, slide_stem
from pipelines.labels.annotation_files import DRAWING_SUFFIXES, MASK_SUFFIXES, RASTER_SUFFIXES, files_below, slides_of
from pipelines.labels.conversion import classes_of_masks, read_areas, write_area_mask, write_areas
from pipelines.labels.drawing import Origin
from pipelines.labels.slide_labels import read_mpp
from pipelines.slides.geometry import MPP_MAX, MPP_MIN, check_mpp
from pipelines.slides.slide import SlideError

NO_BOUNDS = "no --slide given: taken for one whose scan begins at the corner of level 0 (that of MRXS and SCN may not)"


@dataclass(frozen=True)
class ConvertCommand:
    """Turn annotation files into another format."""

    source: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="IN")]
    """GeoJSON, XML of ASAP or ImageScope, a mask (TIFF, PNG), DICOM SEG, or a folder of such files."""
    target: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="OUT")]
    """What is made, by its suffix; must not exist. Of a folder: a folder, whose files stay as they are."""
    to: Literal[".geojson", ".tif", ".png"] | None = None
    """What is made of each file of a folder."""
    slide: Path | None = None
    """The slide that was drawn on, or the folder of the slides; for masks, and for slides with bounds (MRXS)."""
    mpp: float | None = None
    """um/px of the mask that is made. Default: that of the slide's level 0."""
    opening: OpeningSettings = field(default_factory=OpeningSettings)

    @property
    def suffix(self) -> str:
        return self.to or self.target.suffix.lower()

    def validate(self) -> list[str]:
        source, target, masks = self.source, self.target, self.suffix in MASK_SUFFIXES
        readable, writable = (*DRAWING_SUFFIXES, *RASTER_SUFFIXES), (".geojson", ".json", *MASK_SUFFIXES)
        rasters = ((source, RASTER_SUFFIXES), (target, MASK_SUFFIXES))
        made = " and ".join(str(path) for path, kinds in rasters if path.suffix.lower() in kinds)
        of_folder = {
            f"IN is a folder, {source}: say what to make, as --to .geojson": self.to is None,
            f"OUT must be a folder, as IN is; {target} is a file": target.is_file(),
            f"--to {self.to}: a mask covers a slide: give --slide FOLDER": masks and self.slide is None,
            f"--slide must be a folder, as IN is; got {self.slide}": self.slide is not None and not self.slide.is_dir(),
        }
        of_file = {
            f"IN must end in {', '.join(readable)}; got {source}": source.suffix.lower() not in readable,
            f"OUT must end in {', '.join(writable)}; got {target}": target.suffix.lower() not in writable,
            f"IN must be an annotation file; {source} is none. Check the path": not source.is_file(),
            f"OUT must not exist; {target} does. Remove it, or choose another name": target.exists(),
            f"{made}: a mask covers a slide: give --slide FILE": made and self.slide is None,
            f"--to is for a folder; what OUT is, its suffix says: leave out --to {self.to}": self.to is not None,
        }
        of_mpp = {
            f"--mpp is the resolution of a mask that is made, {MPP_MIN:g} to {MPP_MAX:g} um/px; got {self.mpp} for "
            f"{self.to or target}": self.mpp is not None and not (check_mpp(self.mpp) and masks),
        }
        return broken({**(of_folder if source.is_dir() else of_file), **of_mpp}) + mpp_errors(self.opening.slide_mpp)


def convert(command: ConvertCommand) -> int:
    """Read, write, and say what there was. Exit code of the command."""
    if command.source.is_dir():
        return convert_folder(command)
    slide = None
    if command.slide is not None:
        name = slide_stem(command.slide.name)
        matches = SlideNames([name]).match
        opening = command.opening
        by_slide = read_mpp(command.slide.parent, opening.mpp_table)
        mpp = next((mpp for row, mpp in by_slide.items() if matches(row)), opening.slide_mpp)
        slide = SlideSpec(name, command.slide, mpp, opening.backend, scene=opening.scene)
    if convert_file(command, command.source, command.target, slide, {}):
        print(NO_BOUNDS)
    return OK


def convert_folder(command: ConvertCommand) -> int:
    """Convert every file of a folder, under its name. A file that cannot be converted is reported."""
    sources = sorted(files_below(command.source))
    if not sources:
        raise ValueError(f"IN holds no annotation file: {command.source}. Check the path")
    specs = () if command.slide is None else slides_in(command.slide, command.opening)
    slides = slides_of(sources, specs)
    named = classes_of_masks(sources, str(command.source)) if specs else {}
    made: dict[Path, Path] = {}
    failed = there = 0
    guessed = False
    for source in sources:
        target = command.target / source.relative_to(command.source).with_suffix(command.suffix)
        try:
            if target in made:
                raise ValueError(f"{target} is made of {made[target]} already: two files of one name")
            if target.exists():
                there += 1
                continue
            if specs and source not in slides:
                raise ValueError(f"no slide in {command.slide} has the name of {source.name}")
            guessed |= convert_file(command, source, target, slides.get(source), named)
            made[target] = source
        except (SlideError, ValueError, OSError) as fault:
            failed += 1
            reason = str(fault).removeprefix(f"{source}: ")
            print(f"{source}: not converted: {reason}", file=sys.stderr, flush=True)
    if guessed:
        print(NO_BOUNDS)
    print(f"{len(made)} of {len(sources)} files converted, {there} were there already, {failed} failed")
    return FAILED if failed else OK


def convert_file(
    command: ConvertCommand, source: Path, target: Path, spec: SlideSpec | None, named: Mapping[int, str]
) -> bool:
    """Make ``target`` of ``source``, drawn on the slide of ``spec``, and say so. Return whether the corner of the
    slide's scan would have been needed, and is not known.

    Args:
        named: class names by value of all masks of the folder; empty: of a single file.

    Raises:
        SlideError, ValueError, OSError: ``source`` or the slide cannot be read, or ``target`` not written.
    """
    with contextlib.ExitStack() as opened:
        slide = None if spec is None else opened.enter_context(spec.open())
        if slide is None and source.suffix.lower() in RASTER_SUFFIXES:
            raise ValueError(f"{source}: a mask covers a slide: give --slide")
        drawing = read_areas(source, slide, named)
        target.parent.mkdir(parents=True, exist_ok=True)
        if command.suffix in MASK_SUFFIXES:
            assert slide is not None
            out = command.target if command.source.is_dir() else None
            size = write_area_mask(drawing, target, slide, command.mpp or slide.mpp, named.values(), out)
            made = f"{size.width} x {size.height} px at {command.mpp or slide.mpp:g} um/px"
        else:
            made = "geojson"
            write_areas(drawing, target, slide)
    left_out = "".join(f"; left out: {count} x {kind}" for kind, count in drawing.left_out.items())
    print(
        f"{target}: {made}, {len(drawing.box)} polygons of {len(drawing.start)} points, "
        f"classes {', '.join(drawing.classes) or 'none'}{left_out}"
    )
    return slide is None and drawing.origin is not Origin.BOUNDS


def main(argv: Sequence[str] | None = None) -> int:
    return run_command(ConvertCommand, convert, argv, prog="python -m app.convert")


if __name__ == "__main__":
    sys.exit(main())
