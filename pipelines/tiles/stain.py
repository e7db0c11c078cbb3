"""Stains of slides, each measured on its tissue once: what stain normalisation changes slides from and to.

A ``StainFit`` has the colours and strengths of two stains (Macenko et al. 2009, "A method for normalizing histology
slides for quantitative analysis"), or mean and spread of the tissue's colours in l alpha beta (Reinhard et al. 2001,
"Color transfer between images"). The pixels looked at follow from the slide and ``tissue_mpp`` alone, so that training
and prediction, and every rank, find the same. Fits are kept in ``stains.json`` of the run's folder.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import cv2
import numpy as np
from numpy.typing import NDArray

from pipelines import Rare
from pipelines.catalog.catalog import SlideNames, SlideSpec
from pipelines.catalog.handles import SlideState
from pipelines.catalog.processes import map_isolated
from pipelines.catalog.table import FailedSlides, counted
from pipelines.slides.geometry import Region, l0_from_l
from pipelines.slides.slide import Pixels, Slide, SlideError, TileReadError
from pipelines.slides.whole_files import write_text
from pipelines.tiles.slide_index import default_threads, error_text, slide_limits
from pipelines.tiles.tissue import Overview, TissueMask, find_tissue, is_fluorescence, read_overview

Method = Literal["macenko", "reinhard"]

REGIONS, REGION_PX, FIT_MPP = 128, 64, 2.0
"""Squares of tissue that are looked at, evenly spread; their side in px; um/px, finer where there is little tissue."""

LEAST_DENSITY, PERCENT = 0.15, 1.0
"""Optical density of stained tissue in every channel (Macenko et al., beta); percent of the px beyond either stain's
direction, and beyond its greatest amount (alpha)."""

LEAST_PX, LEAST_ANGLE, LEAST_AMOUNT = 1000, 6.0, 0.1
"""Below these nothing is measured: stained px, degrees between two stains, density of the strongest px of a stain."""

MOST_EOSIN = 1.75
"""Times the greatest amount of haematoxylin that of eosin may be. More is a blue or violet stain."""

LEAST_SPREAD = (0.12, 0.022, 0.0057)
"""Standard deviations in l, alpha, beta: a fifth of those of an H&E slide. With less, noise would become colour."""

LMS_FROM_RGB = np.array([[0.3811, 0.5783, 0.0402], [0.1967, 0.7244, 0.0782], [0.0241, 0.1288, 0.8444]])
"""Light of the long, middle and short cones (column vector) = LMS_FROM_RGB @ light in R, G, B (Reinhard et al.)."""

LAB_FROM_LOG_LMS = np.array([[1, 1, 1], [1, 1, -2], [1, -1, 0]]) / np.sqrt([[3], [6], [2]])
"""l, alpha, beta (column vector) = LAB_FROM_LOG_LMS @ logarithm of L, M, S (Reinhard et al.)."""


class NoStainFit(SlideError):
    """A slide whose stains cannot be measured: says why."""


@dataclass(frozen=True)
class StainFit:
    """Stain of a slide.

    Attributes:
        numbers: macenko: optical density in R, G, B of a unit of haematoxylin, of eosin, and the greatest amount of
            each (8); reinhard: mean of l, alpha, beta, and standard deviation of each, natural logarithms of light
            0 to 1 (6).
    """

    method: Method
    numbers: tuple[float, ...]

    @property
    def stains(self) -> NDArray[np.float64]:
        """Rows haematoxylin and eosin, columns R, G, B."""
        assert self.method == "macenko"
        return np.array(self.numbers[:6]).reshape(2, 3)

    @property
    def amounts(self) -> NDArray[np.float64]:
        """Greatest amounts of haematoxylin and of eosin."""
        return np.array(self.numbers[6:])

    @property
    def mean(self) -> NDArray[np.float64]:
        """Values of l, alpha, beta."""
        assert self.method == "reinhard"
        return np.array(self.numbers[:3])

    @property
    def spread(self) -> NDArray[np.float64]:
        """Standard deviation of l, alpha, beta."""
        return np.array(self.numbers[3:])


PUBLISHED: dict[Method, StainFit] = {
    "macenko": StainFit("macenko", (0.5626, 0.7201, 0.4062, 0.2159, 0.8012, 0.5581, 1.9705, 1.0308)),
    "reinhard": StainFit(
        "reinhard",
        (8.74108109 - math.sqrt(3) * math.log(256), -0.12440419, 0.0444982, 0.6135447, 0.10989545, 0.0286032),
    ),
}
"""What slides are made to look like unless another is asked for. macenko: the reference that the method's published
implementations share (M. Veta's stain normalisation toolbox); reinhard: a region of TCGA-A2-A3XS-DX1 (Amgad et al.
2019, "Structured crowdsourcing enables convolutional segmentation of histology images"), there of light 0 to 255."""


def fit_slide(slide: Slide, overview: Overview, method: Method) -> StainFit:
    """Return how ``slide`` is stained.

    Raises:
        NoStainFit: it is fluorescent, has too little stained tissue, or one stain only.
    """
    if is_fluorescence(cv2.medianBlur(overview.pixels, 3)):
        raise NoStainFit("a fluorescence slide: its stains give light, and do not take it")
    return fit_pixels(tissue_pixels(slide, find_tissue(overview)), method)


def tissue_pixels(slide: Slide, tissue: TissueMask) -> Pixels:
    """Return px of the tissue, uint8 (n, 3): of ``REGIONS`` squares around places evenly spread over it; what cannot
    be read is left out."""
    rows, columns = np.nonzero(tissue.mask)
    places = np.unique(np.linspace(0, len(rows) - 1, min(REGIONS, len(rows))).astype(np.int64))
    mpp = max(slide.mpp, min(FIT_MPP, tissue.mpp * math.sqrt(len(rows) / (REGIONS * REGION_PX**2))))
    l0_px = mpp / slide.mpp
    kept = [np.empty((0, 3), np.uint8)]
    for place in places:
        l0_x, l0_y = (
            origin + l0_from_l(float(cell[place]) + 0.5, tissue.downsample) - round(REGION_PX / 2 * l0_px)
            for origin, cell in ((tissue.l0_x, columns), (tissue.l0_y, rows))
        )
        try:
            pixels = slide.read(Region(l0_x, l0_y, REGION_PX, REGION_PX, mpp))
        except TileReadError:
            continue
        kept.append(pixels[_mask_of(tissue, l0_x, l0_y, l0_px)])
    return np.concatenate(kept)


def _mask_of(tissue: TissueMask, l0_x: int, l0_y: int, l0_px: float) -> NDArray[np.bool_]:
    """Tissue per px of a square at ``l0_x``, ``l0_y``, whose px are ``l0_px`` of level 0."""
    inside, cells = [], []
    for origin, first, length in zip((l0_y, l0_x), (tissue.l0_y, tissue.l0_x), tissue.mask.shape, strict=True):
        cell = np.floor((origin + (np.arange(REGION_PX) + 0.5) * l0_px - first) / tissue.downsample).astype(np.int64)
        inside.append((cell >= 0) & (cell < length))
        cells.append(np.clip(cell, 0, length - 1))
    mask: NDArray[np.bool_] = tissue.mask[np.ix_(*cells)] & np.outer(*inside)
    return mask


def fit_pixels(pixels: Pixels, method: Method) -> StainFit:
    """Return the stain of tissue px, uint8 (n, 3). NoStainFit: too few are stained, or by one stain only."""
    density = -np.log((pixels.astype(np.float64) + 1) / 256)
    density = density[(density >= LEAST_DENSITY).all(1)]
    if len(density) < LEAST_PX:
        raise NoStainFit(f"{len(density)} px of its tissue are stained; at least {LEAST_PX} are needed")
    return _macenko(density) if method == "macenko" else _reinhard(density)


def _macenko(density: NDArray[np.float64]) -> StainFit:
    """Return the two outermost directions of optical density in the plane that holds most of it."""
    plane = np.linalg.eigh(np.cov(density.T))[1][:, [2, 1]]
    plane *= np.where(plane.sum(0) < 0, -1, 1)  # the first points where light is taken from
    projected = density @ plane
    angles = np.percentile(np.arctan2(projected[:, 1], projected[:, 0]), [PERCENT, 100 - PERCENT])
    if (apart := np.degrees(angles[1] - angles[0])) < LEAST_ANGLE:
        raise NoStainFit(
            f"its tissue has one stain only: colours lie within {apart:.1f} degrees; two have {LEAST_ANGLE:g} or more"
        )
    stains = np.stack([plane @ [np.cos(angle), np.sin(angle)] for angle in angles])
    stains = stains[np.argsort(-stains[:, 0])]  # haematoxylin takes more of the red
    amounts = np.percentile(density @ np.linalg.pinv(stains), 100 - PERCENT, axis=0)
    if amounts.min() < LEAST_AMOUNT:
        raise NoStainFit(f"of one stain there is almost nothing: {amounts.min():.2f}, at least {LEAST_AMOUNT:g}")
    if amounts[1] > MOST_EOSIN * amounts[0]:
        raise NoStainFit(
            "it is not stained by haematoxylin and eosin: its darkest tissue would be eosin, "
            f"{amounts[1] / amounts[0]:.1f} times the haematoxylin; at most {MOST_EOSIN:g}"
        )
    return StainFit("macenko", _rounded([*stains.ravel(), *amounts]))


def _reinhard(density: NDArray[np.float64]) -> StainFit:
    lab = np.log(np.exp(-density) @ LMS_FROM_RGB.T) @ LAB_FROM_LOG_LMS.T
    spread = lab.std(0)
    if (spread < LEAST_SPREAD).any():
        raise NoStainFit(
            "its tissue has one colour only: standard deviations in l, alpha, beta of "
            f"{', '.join(f'{value:.3g}' for value in spread)}; at least {', '.join(f'{v:g}' for v in LEAST_SPREAD)}"
        )
    return StainFit("reinhard", _rounded([*lab.mean(0), *spread]))


def _rounded(numbers: Sequence[float]) -> tuple[float, ...]:
    """Six decimals, which no px can tell apart; what is beyond depends on the processor."""
    return tuple(round(float(number), 6) for number in numbers)


STAINS_FILE = "stains.json"


@dataclass(frozen=True)
class StainSettings:
    """Stain normalisation of slides, in training and prediction."""

    stain: Literal["none", "macenko", "reinhard"] = "none"
    """Stain normalisation, fitted once for each slide: macenko, two stains; reinhard, mean and spread of colours."""
    stain_target: Rare[str] = ""
    """Slide of --slides that the others are made to look like; default: the method's published reference."""

    @property
    def method(self) -> Method | None:
        """Which normalisation; None: none."""
        return None if self.stain == "none" else self.stain

    def validate(self) -> list[str]:
        """Return every fault of these settings."""
        if self.stain_target and self.method is None:
            return [f"--stain-target is for --stain macenko or reinhard; got {self.stain_target} without"]
        return []


@dataclass(frozen=True)
class StainFits:
    """Stains of slides.

    Attributes:
        tissue_mpp: resolution at which tissue was looked for.
        fits: by slide id; where there is none, why.
        digests: of the slides' bytes, by slide id; empty for a slide that the next start measures again.
    """

    method: Method
    tissue_mpp: float
    fits: Mapping[str, StainFit | str] = field(default_factory=dict)
    digests: Mapping[str, str] = field(default_factory=dict)

    def target(self, slide_id: str) -> StainFit:
        """Return what slides are made to look like: the slide of that name, or, without one, the published reference.

        Raises:
            ValueError: there is no such slide, or it has no fit.
        """
        if not slide_id:
            return PUBLISHED[self.method]
        matched = SlideNames(self.fits).match(slide_id) or slide_id
        fit = self.fits.get(matched, "no slide of --slides that takes part has this name")
        if isinstance(fit, str):
            raise ValueError(f"--stain-target {slide_id} cannot be the target: {fit}; name another slide")
        return fit

    def save(self, path: Path) -> None:
        """Write JSON, atomically."""
        slides = {}
        for name, fit in self.fits.items():
            numbers, fault = (None, fit) if isinstance(fit, str) else (list(fit.numbers), None)
            slides[name] = {"numbers": numbers, "fault": fault, "digest": self.digests[name]}
        about = {"method": self.method, "tissue_mpp": self.tissue_mpp, "slides": slides}
        write_text(path, json.dumps(about, indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> StainFits:
        """Read what ``save`` wrote.

        Raises:
            ValueError: the file is something else.
        """
        try:
            stored = json.loads(path.read_text())
            method, slides = stored["method"], stored["slides"]
            fits = {s: slide["fault"] or StainFit(method, tuple(slide["numbers"])) for s, slide in slides.items()}
            digests = {slide_id: slide["digest"] for slide_id, slide in slides.items()}
            return cls(method, stored["tissue_mpp"], fits, digests)
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as fault:
            raise ValueError(f"{path} does not hold stains of slides ({fault}); delete it to fit anew") from fault


def fit_slides(
    specs: Sequence[SlideSpec],
    method: Method,
    tissue_mpp: float,
    out: Path,
    *,
    workers: int = 0,
    progress: Callable[[str], None] = lambda told: None,
    resumed: bool = False,
) -> StainFits:
    """Return the stains of ``specs``: those that ``out`` has in its file, and others as they are measured now.

    Args:
        resumed: a run that has used these stains continues: a slide that has no fit keeps its colours to the end.

    Raises:
        ValueError: the file in ``out`` is something else.
    """
    path = out / STAINS_FILE
    known = StainFits.load(path) if path.exists() else StainFits(method, tissue_mpp)
    if (known.method, known.tissue_mpp) != (method, tissue_mpp):
        known = StainFits(method, tissue_mpp)
    now = {spec.slide_id: _digest(spec) for spec in specs}
    todo = [
        spec
        for spec in specs
        if known.digests.get(spec.slide_id) != now[spec.slide_id] and not (resumed and spec.slide_id in known.fits)
    ]
    if not todo:
        return known
    progress(f"stains of {counted(len(todo), 'slide')} are looked at ({method})")
    threads = default_threads(workers := min(workers or default_threads(1), len(todo)))
    task = functools.partial(stain_of, method=method, tissue_mpp=tissue_mpp, threads=threads)
    fits, digests = dict(known.fits), dict(known.digests)
    failed = FailedSlides(out / "failed_slides.csv")
    failed.remove([spec.slide_id for spec in todo], "stain")
    for spec, result in map_isolated(task, todo, workers, slide_limits(threads)):
        fits[spec.slide_id] = result if isinstance(result, StainFit) else str(result)
        # Other errors, such as a timeout or a lost share, say nothing about the slide.
        digests[spec.slide_id] = now[spec.slide_id] if isinstance(result, StainFit | NoStainFit) else ""
        if not isinstance(result, StainFit):
            failed.add(spec.slide_id, "stain", f"its colours are left as they are: {result}")
        done = StainFits(method, tissue_mpp, dict(sorted(fits.items())), digests)
        done.save(path)  # a signal may end the process
    if without := sum(isinstance(fits[spec.slide_id], str) for spec in todo):
        progress(f"{without} of {counted(len(todo), 'slide')} keep their colours, as {failed.path} says")
    return done


def _digest(spec: SlideSpec) -> str:
    """Return the digest of a slide; empty where a server cannot be asked: its fit is tried, and says why."""
    try:
        return spec.state.digest if spec.state else SlideState.of(spec.path).digest
    except SlideError:
        return ""


def stain_of(spec: SlideSpec, method: Method, tissue_mpp: float, threads: int) -> StainFit | NoStainFit | str:
    """Return the fit of one slide, why it has none, or the error that prevented the measurement; for a process of its
    own."""
    cv2.setNumThreads(threads)
    try:
        with spec.open() as slide:
            return fit_slide(slide, read_overview(slide, tissue_mpp, threads), method)
    except NoStainFit as fault:
        return fault
    except Exception as fault:  # slide libraries raise anything; the other slides continue
        return error_text(fault)
