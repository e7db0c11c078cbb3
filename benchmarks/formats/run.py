"""Open every format: what the slide is taken for, and 200 regions of it compared with two other readers.

Takes the slides of ``data/real``, generated ones, and those of any folders given; prints for each its size, um/px,
levels, backend, a checksum of the regions, and the largest difference to OpenSlide and to the format's own library.

    python -m benchmarks.formats.run [--extra DIR ...] [--regions 200] [--write]
"""

from __future__ import annotations

import hashlib
import random
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.formats.references import MAX_PX, openslide_level, own_library
from benchmarks.results import markdown_table, parser_of, publish, results
from pipelines.catalog.catalog import FILE_SUFFIXES, FOLDER_SUFFIX, SlideSpec, find_slides, slide_stem
from pipelines.slides.geometry import Level, Region, l0_from_l, l_from_l0
from pipelines.slides.slide import Pixels, Slide, SlideError
from tests.helpers.format_files import write_read_ones, write_refused_ones

REAL = Path(__file__).parents[2] / "data" / "real"
MPP_WHERE_MISSING = 0.5
"""For slides that record no um/px: it changes no pixel of their own levels."""
SIDE_PX = 300
"""Largest side of a region."""

Reference = Callable[[Path, Level], Pixels | None]


def regions(levels: tuple[Level, ...], count: int) -> Iterator[tuple[Level, int, int, int, int]]:
    """(level, x, y, width, height) in px of the level: every level in turn, every third region across an edge."""
    places = random.Random(0)
    for i in range(count):
        level = levels[i % len(levels)]
        width, height = places.randint(1, SIDE_PX), places.randint(1, SIDE_PX)
        x, y = places.randint(0, max(0, level.width - width)), places.randint(0, max(0, level.height - height))
        if i % 3 == 0:
            x = places.choice([-width // 2, x, level.width - width // 2])
            y = places.choice([-height // 2, level.height - height // 2])
        l0_x, l0_y = l0_from_l(x, level.downsample), l0_from_l(y, level.downsample)
        yield level, l_from_l0(l0_x, level.downsample), l_from_l0(l0_y, level.downsample), width, height


def cut(pixels: Pixels, x: int, y: int, width: int, height: int) -> Pixels:
    """The box of a level, white outside of it."""
    out = np.full((height, width, 3), 255, np.uint8)
    left, top = max(0, x), max(0, y)
    inside = pixels[top : max(0, y + height), left : max(0, x + width)]
    out[top - y : top - y + inside.shape[0], left - x : left - x + inside.shape[1]] = inside
    return out


def measured(spec: SlideSpec, slide: Slide, count: int) -> tuple[str, ...]:
    """The row of one slide."""
    library = ""

    def own(path: Path, level: Level) -> Pixels | None:
        nonlocal library
        decoded = own_library(path, level)
        library = library or (decoded[0] if decoded else "")
        return decoded[1] if decoded else None

    asked, digest = list(regions(slide.levels, count)), hashlib.sha256()
    worst: dict[Reference, list[int]] = {openslide_level: [], own: []}
    ours = []
    for level, x, y, width, height in asked:
        l0_x, l0_y = l0_from_l(x, level.downsample), l0_from_l(y, level.downsample)
        ours.append(slide.read(Region(l0_x, l0_y, width, height, level.mpp)))
        digest.update(ours[-1].tobytes())
    for reference, differences in worst.items():
        for level in slide.levels:
            pixels = reference(slide.path, level) if level.width * level.height <= MAX_PX else None
            if pixels is None:
                continue
            for (of, *box), got in zip(asked, ours, strict=True):
                if of is level:
                    differences.append(int(np.abs(cut(pixels, *box).astype(np.int16) - got).max()))
    level0 = slide.levels[0]
    return (
        slide.path.parent.name if spec.slide_id == slide.path.parent.name else slide.path.name,
        f"{level0.width} x {level0.height}",
        f"{slide.mpp:.4g}" + (" (given)" if spec.mpp else ""),
        str(len(slide.levels)),
        slide.backend,
        digest.hexdigest()[:12],
        shown(worst[openslide_level], count),
        f"{library}: {shown(worst[own], count)}" if library else "",
    )


def shown(differences: list[int], count: int) -> str:
    """``equal``, or the largest difference of 255; and of how many regions where not of all."""
    if not differences:
        return "does not read it"
    told = "equal" if max(differences) == 0 else f"{max(differences)} at most"
    return told if len(differences) == count else f"{told}, in {len(differences)} of {count}"


def opened(spec: SlideSpec) -> tuple[SlideSpec, Slide]:
    try:
        return spec, spec.open()
    except SlideError as error:
        if "--slide-mpp" not in str(error):
            raise
        spec = replace(spec, mpp=MPP_WHERE_MISSING)
        return spec, spec.open()


def slides_of(folders: list[Path]) -> Iterator[SlideSpec]:
    """Every slide once, though its copy lie in several folders."""
    seen: set[tuple[str, int]] = set()
    for entry in [entry for folder in folders for entry in sorted(folder.iterdir())]:  # copies may be of one name
        if entry.is_dir() and entry.suffix != FOLDER_SUFFIX:
            specs = () if entry.with_suffix(".mrxs").exists() else find_slides(entry)
        elif entry.suffix.lower() in {*FILE_SUFFIXES, FOLDER_SUFFIX}:
            specs = (SlideSpec(slide_stem(entry.name), entry),)
        else:
            continue
        for spec in specs:
            key = (spec.path.name, spec.path.stat().st_size)
            if key not in seen:
                seen.add(key)
                yield spec


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--extra", type=Path, nargs="+", default=[], help="further folders of slides")
    parser.add_argument("--regions", type=int, default=200, help="of each slide")
    arguments = parser.parse_args()
    rows, refused = [], []
    with tempfile.TemporaryDirectory() as read, tempfile.TemporaryDirectory() as others:
        write_read_ones(Path(read))
        write_refused_ones(Path(others))
        for spec in slides_of([REAL, *arguments.extra, Path(read)]):
            spec, slide = opened(spec)
            with slide:
                rows.append(measured(spec, slide, arguments.regions))
            print(*rows[-1], sep=" | ", flush=True)
        for spec in slides_of([Path(others)]):
            try:
                spec.open().close()
                refused.append((spec.path.name, "OPENED"))
            except SlideError as error:
                said = " ".join(str(error).replace(f"{spec.path}: ", "").split())
                refused.append((spec.path.name, said.replace("|", "\\|")))
    header = ("slide", "level 0, px", "um/px", "levels", "backend", "checksum", "OpenSlide", "own library")
    told = f"{arguments.regions} regions of each slide, up to {SIDE_PX} px a side, on all levels, some over an edge.\n"
    text = results(
        markdown_table(header, rows),
        told,
        "Refused by name:\n",
        markdown_table(("slide", "error"), refused),
    )
    publish(__file__, text, arguments.write)


if __name__ == "__main__":
    main()
