"""How often blur and pen marks are flagged, and how often wrongly: real tissue, blurred and drawn on by known amounts.

Takes the slide and the pictures of ``data/``; gives the shares of windows called out of focus after blurs of known
width, and of strokes of known ink and width that are found. Pictures of ``data/nuclei`` record no um/px: they are taken
at 0.25, where their nuclei have 6 to 12 um.

    python -m benchmarks.slide_quality.run [--strokes 40] [--write]
"""

from __future__ import annotations

import time
from pathlib import Path

import cv2
import numpy as np

from benchmarks.results import markdown_table, parser_of, publish, results
from pipelines.catalog.catalog import SlideSpec
from pipelines.slides.geometry import Region
from pipelines.slides.slide import Pixels
from pipelines.tiles.quality import FOCUS_MPP, SHARP, WINDOW_PX, pen_of, sharpness_of, slide_quality
from pipelines.tiles.tissue import read_overview

DATA = Path(__file__).parents[2] / "data"
SLIDE, SLIDE_MPP = DATA / "real" / "CMU-1-Small-Region.svs", 0.499
NUCLEI_MPP = 0.25
BLURS_UM = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 8.0)
INKS = {"blue": (30, 60, 190), "green": (20, 140, 70), "black": (35, 33, 36), "red": (205, 25, 40)}
STROKES_UM = (30, 60, 100, 200)
"""Widths; what is smaller than 0.04 mm2 is not meant to be found, and a stroke of 1 mm and 30 um is smaller."""


def blurred(pixels: Pixels, sigma_um: float, mpp: float) -> Pixels:
    """A picture at ``FOCUS_MPP`` of one that was blurred, and compressed as a slide is."""
    fine = cv2.GaussianBlur(pixels, (0, 0), sigma_um / mpp) if sigma_um else pixels
    small = cv2.resize(fine, None, fx=mpp / FOCUS_MPP, fy=mpp / FOCUS_MPP, interpolation=cv2.INTER_AREA)
    encoded = cv2.imencode(".jpg", small, [cv2.IMWRITE_JPEG_QUALITY, 80])[1]
    return cv2.imdecode(encoded, cv2.IMREAD_COLOR).astype(np.uint8)


def focus_row(pictures: list[Pixels], sigma_um: float, mpp: float) -> tuple[str, ...]:
    """Pictures judged, the part called out of focus, and the 5th, 50th and 95th percentile of their sharpness."""
    values = [v for p in pictures if (v := sharpness_of(blurred(p, sigma_um, mpp))) is not None]
    share = np.mean(np.array(values) < SHARP)
    return (str(len(values)), f"{share:.1%}", *(f"{v:.3g}" for v in np.percentile(values, [5, 50, 95])))


def found_strokes(overview: Pixels, mpp: float, ink: str, width_um: int, strokes: int) -> str:
    """Part of strokes of 1 mm at random places, across tissue or glass, of which most is found."""
    rng = np.random.default_rng([width_um, len(ink)])
    found = 0
    fine = cv2.resize(overview, None, fx=4, fy=4, interpolation=cv2.INTER_LINEAR)
    height, width = fine.shape[:2]
    length = 1000 / mpp * 4
    for _ in range(strokes):
        x, y = rng.uniform(0.2, 0.8, 2) * (width, height)
        turn = rng.uniform(0, np.pi)
        dx, dy = length / 2 * np.cos(turn), length / 2 * np.sin(turn)
        ends = [(round(x - dx), round(y - dy)), (round(x + dx), round(y + dy))]
        drawn, where = fine.copy(), np.zeros((height, width), np.uint8)
        thick = max(1, round(width_um / mpp * 4))
        cv2.line(drawn, *ends, INKS[ink], thick, cv2.LINE_AA)
        cv2.line(where, *ends, 255, thick)
        small = cv2.resize(drawn, overview.shape[1::-1], interpolation=cv2.INTER_AREA).astype(np.uint8)
        true = cv2.resize(where, overview.shape[1::-1], interpolation=cv2.INTER_AREA) > 127
        found += bool((pen_of(small, mpp) & true).sum() > 0.5 * true.sum())
    return f"{found / strokes:.0%}"


def windows(step: int = 256) -> list[Pixels]:
    """Windows of the real slide at its own resolution."""
    side = round(WINDOW_PX * FOCUS_MPP / SLIDE_MPP)
    with SlideSpec("slide", SLIDE).open() as slide:
        level = slide.levels[0]
        return [
            slide.read(Region(x, y, side, side, slide.mpp))
            for y in range(0, level.height - side, step)
            for x in range(0, level.width - side, step)
        ]


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--strokes", type=int, default=40, help="of each ink and width")
    arguments = parser.parse_args()
    cv2.setNumThreads(1)
    sets = {
        f"{SLIDE.stem}, windows of 256 um": (windows(), SLIDE_MPP),
        "data/nuclei, pictures of 80 x 64 um": (
            [cv2.imread(str(p))[..., ::-1].copy() for p in sorted((DATA / "nuclei" / "images").glob("*.png"))],
            NUCLEI_MPP,
        ),
    }
    focus = [
        (name, f"{sigma:g}", *focus_row(pictures, sigma, mpp))
        for name, (pictures, mpp) in sets.items()
        for sigma in BLURS_UM
    ]
    with SlideSpec("slide", SLIDE).open() as slide:
        overview = read_overview(slide, 8.0, 1)
        begun_s = time.process_time()
        tiles = np.arange(24, dtype=np.int64) * 80
        clean = slide_quality(slide, overview, tiles, tiles, (512, 512))
        seconds = time.process_time() - begun_s
    pens = [
        (ink, *(found_strokes(overview.pixels, overview.mpp, ink, w, arguments.strokes) for w in STROKES_UM))
        for ink in INKS
    ]
    nuclei, mpp = sets["data/nuclei, pictures of 80 x 64 um"]
    wrong = sum(bool(pen_of(picture, mpp).any()) for picture in nuclei)
    told = (
        f"Pen marks on the slide as it is: {clean.pen_mm2:g} mm2; on {wrong} of the {len(nuclei)} pictures. A slide is "
        f"judged in {seconds:.2f} s of a core.\n"
    )
    tables = (
        markdown_table(("tissue", "blur, sigma in um", "judged", f"below {SHARP:g}", "5 %", "median", "95 %"), focus),
        markdown_table(("stroke of 1 mm", *(f"{w} um wide" for w in STROKES_UM)), pens),
    )
    text = results("python -m benchmarks.slide_quality.run --write", "\n\n".join(tables), told)
    publish(__file__, text, arguments.write)


if __name__ == "__main__":
    main()
