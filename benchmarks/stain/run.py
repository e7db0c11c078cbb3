"""Stain normalisation measured: Mpx/s beside torch-staintools on the same tiles, and a picture before and after.

Takes the shipped slide and pictures of nuclei; writes results into the README and
``before_and_after.jpg``. The library is measured where it is installed.

    python -m benchmarks.stain.run [--repeats 9] [--tile 512] [--tiles 8]
"""

from __future__ import annotations

import functools
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import cv2
import numpy as np
import torch

from benchmarks.results import markdown_table, parser_of, results, write_results
from pipelines.catalog.catalog import SlideSpec
from pipelines.slides.geometry import Region
from pipelines.slides.slide import Pixels
from pipelines.stream.augment import AugmentSettings, StainSteps, apply_jitter, jitter
from pipelines.stream.device_pixels import IMAGENET, PixelMaker
from pipelines.tiles.stain_fit import PUBLISHED, Method, NoStainFit, StainFit, fit_slide
from pipelines.tiles.tissue import read_overview

HERE = Path(__file__).parent
DATA = HERE.parents[1] / "data"
SLIDE = DATA / "real" / "CMU-1-Small-Region.svs"
METHODS: tuple[Method, ...] = ("macenko", "reinhard")
CPU = torch.device("cpu")
NONE = AugmentSettings(augment="none")
RESTAINED, RESTAINED_SHOWN, NUCLEI = 8, 4, 2
"""Slides stained otherwise, those shown of them, and pictures of nuclei that are shown."""
CHANGE, LIGHT = 0.4, 0.15
"""Largest change of a stain's amount and of the light, as parts."""
MPP = 0.499
"""um/px of the slide; pictures of nuclei are taken to have it, too."""
STEP = 4
"""Every fourth row and column of px is compared between slides."""
TISSUE_LEVEL = 190
"""Px whose darkest channel is below are tissue."""
PLACE = (1200, 1500)
"""Of the slide, shown."""
CELL = (220, 176)
"""Width and height of each cell of the picture."""


def read_tiles(count: int, side: int) -> Pixels:
    """The ``count`` darkest tiles of the slide, uint8 (n, side, side, 3), over and over where it has fewer."""
    with SlideSpec("slide", SLIDE).open() as slide:
        columns, rows = slide.levels[0].width // side, slide.levels[0].height // side
        places = [(x * side, y * side) for y in range(rows) for x in range(columns)]
        tiles = sorted((slide.read(Region(*place, side, side, slide.mpp)) for place in places), key=np.mean)
    dark = tiles[: max(1, len(tiles) // 2)]
    return np.stack([dark[k % len(dark)] for k in range(count)])


@functools.cache
def fit_of(path: Path, method: Method, mpp: float | None = None) -> StainFit | None:
    """How the slide at ``path`` is stained."""
    with SlideSpec(path.stem, path, mpp).open() as slide:
        try:
            return fit_slide(slide, read_overview(slide, 8.0, 1), method)
        except NoStainFit:
            return None


def peers(tiles: Pixels) -> dict[str, Callable[[], torch.Tensor]]:
    """What is measured, by name: each gives float32 (n, 3, h, w)."""
    stored, samples, rows = torch.from_numpy(tiles), np.arange(len(tiles)), np.zeros(len(tiles), np.int64)

    def ours(settings: AugmentSettings, method: Method | None) -> Callable[[], torch.Tensor]:
        steps = None if method is None else StainSteps.of(PUBLISHED[method], [fit_of(SLIDE, method)], [0])
        maker = PixelMaker(CPU, settings, 0, stains=steps)

        def make() -> torch.Tensor:
            drawn = maker.drawn(samples, rows)
            return maker.floats(stored, drawn)

        return make

    jitter = AugmentSettings(flip=False)
    made = {"scaled only": ours(NONE, None), "jitter": ours(jitter, None)}
    for method in METHODS:
        made |= {method: ours(NONE, method), f"{method}, jitter": ours(jitter, method)}
    return made | _library(stored)


def _library(stored: torch.Tensor) -> dict[str, Callable[[], torch.Tensor]]:
    try:
        from torch_staintools.normalizer import NormalizerBuilder
    except ImportError:
        return {}
    target = _floats(torch.from_numpy(read_tiles(1, 512)))
    made = {}
    for method in METHODS:
        for cached in (False, True) if method == "macenko" else (False,):
            normalizer = NormalizerBuilder.build(method, use_cache=cached)
            normalizer.fit(target)
            words = {"cache_keys": list(map(str, range(len(stored))))} if cached else {}
            name = f"torch-staintools {method}" + (", stains cached" if cached else "")
            made[name] = functools.partial(_normalised, normalizer, stored, words)
    return made


@torch.inference_mode()
def _normalised(normalizer: torch.nn.Module, stored: torch.Tensor, words: dict[str, list[str]]) -> torch.Tensor:
    normalised: torch.Tensor = normalizer.transform(_floats(stored), **words)
    return normalised


def _floats(stored: torch.Tensor) -> torch.Tensor:
    return stored.permute(0, 3, 1, 2).float().div_(255).contiguous()


def measured(made: dict[str, Callable[[], torch.Tensor]], repeats: int) -> dict[str, float]:
    """Median seconds of each, one after the other in every round."""
    seconds: dict[str, list[float]] = {name: [] for name in made}
    for number in range(repeats + 1):
        for name, make in made.items():
            started_s = time.perf_counter()
            make()
            if number:  # the first round warms up
                seconds[name].append(time.perf_counter() - started_s)
    return {name: statistics.median(values) for name, values in seconds.items()}


def blank_tiles() -> str:
    """What becomes of a tile of glass with a camera's noise."""
    glass = np.clip(np.random.default_rng(0).normal(243, 1.5, (1, 512, 512, 3)), 0, 255).astype(np.uint8)
    told = []
    for name, make in peers(glass).items():
        if name not in METHODS and not name.startswith("torch-staintools"):
            continue
        try:
            made = make()
        except Exception as fault:  # of the library: it is what is shown
            told.append(f"{name}: {type(fault).__name__}: {fault}")
            continue
        values = _levels(made) if name in METHODS else made.numpy() * 255
        told.append(f"{name}: {values.min():.0f} to {values.max():.0f}")
    return f"A tile of glass, {glass.min()} to {glass.max()}, becomes: " + "; ".join(told) + "."


def _levels(images: torch.Tensor) -> Pixels:
    mean, std = (np.array(values) for values in IMAGENET)
    values = 255 * (images.numpy().transpose(0, 2, 3, 1) * std + mean)
    return np.clip(np.rint(values), 0, 255).astype(np.uint8)


def normalised(pixels: Pixels, fit: StainFit | None, method: Method) -> Pixels:
    """``pixels``, uint8 (h, w, 3), as the model gets them, before they are scaled."""
    maker = PixelMaker(CPU, NONE, 0, stains=StainSteps.of(PUBLISHED[method], [fit], [0]))
    first = np.zeros(1, np.int64)
    return _levels(maker.floats(torch.from_numpy(pixels[None].copy()), maker.drawn(first, first)))[0]


def restained(folder: Path) -> list[Path]:
    """Write the slide again and again, each time stained by other amounts of haematoxylin and eosin, in other light."""
    numbers = np.random.default_rng(0)
    with SlideSpec("slide", SLIDE).open() as slide:
        level = slide.levels[0]
        whole = slide.read(Region(0, 0, level.width, level.height, slide.mpp))
    paths = [folder / f"{number}.png" for number in range(RESTAINED)]
    for path in paths:
        alpha = 1 + CHANGE * numbers.uniform(-1, 1, (1, 3))
        matrix, shift = jitter(alpha, np.zeros((1, 3)), 1 + LIGHT * numbers.uniform(-1, 0, 1))
        changed = whole.copy()
        apply_jitter(changed, matrix[0], shift[0])
        cv2.imwrite(str(path), changed[..., ::-1])
    return paths


def between_slides(slides: list[Path]) -> str:
    """How far the colours of slides are apart: standard deviation of the mean R, G, B of their tissue."""
    apart = {}
    with SlideSpec("slide", SLIDE).open() as slide:
        level = slide.levels[0]
        tissue = slide.read(Region(0, 0, level.width, level.height, slide.mpp))[::STEP, ::STEP].min(2) < TISSUE_LEVEL
    for method in (None, *METHODS):
        means = []
        for path in slides:
            sample = cv2.imread(str(path))[::STEP, ::STEP, ::-1]
            changed = sample if method is None else normalised(sample, fit_of(path, method, MPP), method)
            means.append(changed[tissue].mean(0))
        apart[method or "as they are"] = np.std(means, 0).mean()
    told = ", ".join(f"{name} {value:.1f}" for name, value in apart.items())
    return f"Mean R, G, B of tissue on {len(slides)} slides, standard deviation between them, of 255: {told}."


def draw_before_and_after(path: Path, slides: list[Path]) -> None:
    """Write a picture: columns are places of the slide, the same stained otherwise, and pictures of nuclei; rows as
    they are, by Macenko, by Reinhard."""
    box = (slice(PLACE[1], PLACE[1] + 512), slice(PLACE[0], PLACE[0] + 640))
    shown = [(source, cv2.imread(str(source))[..., ::-1][box]) for source in slides[:RESTAINED_SHOWN]]
    names = sorted((DATA / "nuclei" / "images").glob("*.png"))
    shown += [(name, cv2.imread(str(name))[:256, :320, ::-1]) for name in names[:: len(names) // NUCLEI][:NUCLEI]]
    rows = []
    for method in (None, *METHODS):
        cells = [p if method is None else normalised(p, fit_of(source, method, MPP), method) for source, p in shown]
        rows.append(np.concatenate([cv2.resize(c, CELL, interpolation=cv2.INTER_AREA) for c in cells], 1))
    cv2.imwrite(str(path), np.concatenate(rows)[..., ::-1], [cv2.IMWRITE_JPEG_QUALITY, 85])


def main() -> None:
    parser = parser_of(__doc__, writes=False)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--tile", type=int, default=512)
    parser.add_argument("--tiles", type=int, default=8)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    seconds = measured(peers(read_tiles(asked.tiles, asked.tile)), asked.repeats)
    mpx = asked.tiles * asked.tile**2 / 1e6
    rows = [[name, f"{mpx / value:.1f}"] for name, value in seconds.items()]
    table = markdown_table([f"{asked.tiles} tiles of {asked.tile} px, one thread", "Mpx/s"], rows)
    command = f"python -m benchmarks.stain.run --repeats {asked.repeats} --tile {asked.tile} --tiles {asked.tiles}"
    with tempfile.TemporaryDirectory() as folder:
        slides = restained(Path(folder))
        write_results(HERE / "README.md", results(command, table, blank_tiles(), between_slides(slides)))
        draw_before_and_after(HERE / "before_and_after.jpg", slides)
    print(table)


if __name__ == "__main__":
    main()
