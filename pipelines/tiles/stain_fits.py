"""Stains of the slides of a run: each measured once, and kept in the run's folder.

Takes slides and a method; gives ``StainFits`` and leaves them as JSON, which every rank and a resumed run read. Slides
are opened in processes of their own; one whose stains cannot be measured is left as it is, named in
``failed_slides.csv``, and the others go on.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import cv2

from pipelines.catalog.catalog import SlideSpec
from pipelines.catalog.failures import FailedSlides
from pipelines.catalog.handles import SlideState
from pipelines.catalog.processes import map_isolated
from pipelines.catalog.table import counted
from pipelines.slides.rare import Rare
from pipelines.slides.slide import SlideError
from pipelines.slides.whole_files import write_text
from pipelines.tiles.slide_index import default_threads, slide_limits
from pipelines.tiles.stain_fit import PUBLISHED, Method, NoStainFit, StainFit, fit_slide
from pipelines.tiles.tissue import read_overview

STAINS_FILE = "stains.json"

STEP = "stain"
"""In ``failed_slides.csv``."""


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
        method: of the fits.
        tissue_mpp: resolution at which tissue was looked for.
        fits: by slide id; None where there is none, and ``faults`` says why.
        digests: of the slides' bytes, by slide id.
    """

    method: Method
    tissue_mpp: float
    fits: Mapping[str, StainFit | None] = field(default_factory=dict)
    faults: Mapping[str, str] = field(default_factory=dict)
    digests: Mapping[str, str] = field(default_factory=dict)

    def target(self, slide_id: str) -> StainFit:
        """Return what slides are made to look like: the slide of that id, or, without one, the published reference.

        Raises:
            ValueError: there is no such slide, or it has no fit.
        """
        if not slide_id:
            return PUBLISHED[self.method]
        fit = self.fits.get(slide_id)
        if fit is None:
            why = self.faults.get(slide_id, "no slide of --slides that takes part has this name")
            raise ValueError(f"--stain-target {slide_id} cannot be the target: {why}; name another slide")
        return fit

    def of_slides(self, ids: Sequence[str]) -> list[StainFit | None]:
        """Return the fits of ``ids``."""
        return [self.fits[slide_id] for slide_id in ids]

    def save(self, path: Path) -> None:
        """Write JSON, atomically."""
        slides = {
            slide_id: {
                "numbers": None if fit is None else list(fit.numbers),
                "fault": self.faults.get(slide_id),
                "digest": self.digests[slide_id],
            }
            for slide_id, fit in self.fits.items()
        }
        text = json.dumps({"method": self.method, "tissue_mpp": self.tissue_mpp, "slides": slides}, indent=1)
        write_text(path, text + "\n")

    @classmethod
    def load(cls, path: Path) -> StainFits:
        """Read what ``save`` wrote.

        Raises:
            ValueError: the file is something else.
        """
        try:
            stored = json.loads(path.read_text())
            method, slides = stored["method"], stored["slides"]
            fits = {
                slide_id: None if slide["numbers"] is None else StainFit(method, tuple(slide["numbers"]))
                for slide_id, slide in slides.items()
            }
            faults = {slide_id: slide["fault"] for slide_id, slide in slides.items() if slide["fault"]}
            digests = {slide_id: slide["digest"] for slide_id, slide in slides.items()}
            return cls(method, stored["tissue_mpp"], fits, faults, digests)
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
) -> StainFits:
    """Return how ``specs`` are stained: as ``out`` has it in its file, and for other slides as it is found now.

    Raises:
        ValueError: the file in ``out`` is something else.
    """
    path = out / STAINS_FILE
    known = StainFits.load(path) if path.exists() else StainFits(method, tissue_mpp)
    if (known.method, known.tissue_mpp) != (method, tissue_mpp):
        known = StainFits(method, tissue_mpp)
    now = {spec.slide_id: _digest(spec) for spec in specs}
    todo = [spec for spec in specs if known.digests.get(spec.slide_id) != now[spec.slide_id]]
    if not todo:
        return known
    progress(f"stains of {counted(len(todo), 'slide')} are looked at ({method})")
    workers = min(workers or default_threads(1), len(todo))
    threads = default_threads(workers)
    task = functools.partial(stain_of, method=method, tissue_mpp=tissue_mpp, threads=threads)
    fits, faults = dict(known.fits), dict(known.faults)
    failed = FailedSlides(out / "failed_slides.csv")
    for spec, result in map_isolated(task, todo, workers, slide_limits(threads)):
        faults.pop(spec.slide_id, None)
        fits[spec.slide_id] = result if isinstance(result, StainFit) else None
        if not isinstance(result, StainFit):
            faults[spec.slide_id] = str(result)
            failed.add(spec.slide_id, STEP, f"its colours are left as they are: {result}")
    done = StainFits(method, tissue_mpp, dict(sorted(fits.items())), faults, {**known.digests, **now})
    done.save(path)
    without = sum(spec.slide_id in faults for spec in todo)
    if without:
        progress(f"{without} of {counted(len(todo), 'slide')} keep their colours, as {failed.path} says")
    return done


def _digest(spec: SlideSpec) -> str:
    """Digest of a slide; empty where a server cannot be asked: its fit is tried, and says why."""
    try:
        return spec.state.digest if spec.state else SlideState.of(spec.path).digest
    except SlideError:
        return ""


def stain_of(spec: SlideSpec, method: Method, tissue_mpp: float, threads: int) -> StainFit | str:
    """Return the fit of one slide, or why there is none; for a process of its own."""
    cv2.setNumThreads(threads)
    try:
        with spec.open() as slide:
            return fit_slide(slide, read_overview(slide, tissue_mpp, threads), method)
    except (NoStainFit, SlideError, ValueError, OSError) as fault:
        return str(fault) or type(fault).__name__
    except Exception as fault:  # slide libraries raise anything; the other slides go on
        return f"{type(fault).__name__}: {fault}"
