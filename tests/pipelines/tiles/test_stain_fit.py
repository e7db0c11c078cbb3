"""Stains of a slide: those a picture was painted with are found again; what has none is refused, by name."""

import json
from dataclasses import replace

import cv2
import numpy as np
import pytest

from pipelines.catalog.catalog import SlideSpec, find_slides
from pipelines.catalog.processes import WorkerCrashed
from pipelines.catalog.table import FailedSlides
from pipelines.tiles.stain import (
    LEAST_PX,
    PUBLISHED,
    STAINS_FILE,
    NoStainFit,
    StainFit,
    StainFits,
    fit_pixels,
    fit_slide,
    fit_slides,
)
from pipelines.tiles.tissue import read_overview
from tests.helpers.real import SVS

STAINS = np.array([[0.60, 0.70, 0.388], [0.15, 0.93, 0.335]])


def painted(amounts):
    """uint8 (n, 3) px of ``amounts`` (n, 2) of ``STAINS``."""
    return np.clip(np.rint(256 * np.exp(-amounts @ STAINS) - 1), 0, 255).astype(np.uint8)


def mixture(n=60_000):
    """Amounts of px of which many have one stain and some both."""
    numbers = np.random.default_rng(0)
    amounts = numbers.uniform(0.3, 1.5, (n, 2))
    amounts[: n // 4, 0] = 0
    amounts[n // 4 : n // 2, 1] = 0
    return amounts


def test_stains_that_were_painted_are_found():
    pixels = painted(mixture())
    glass = np.full((100_000, 3), 250, np.uint8)
    fit = fit_pixels(np.concatenate([glass, pixels]), "macenko")
    unit = STAINS / np.linalg.norm(STAINS, axis=1, keepdims=True)
    assert np.abs(fit.stains - unit).max() < 0.03
    assert fit.amounts == pytest.approx(np.linalg.norm(STAINS, axis=1) * 1.5, rel=0.05)


def test_mean_and_spread_are_those_of_the_tissue():
    """The reference is of the px as they are, in the paper's own steps: LMS, logarithms, three rotations."""
    pixels = painted(mixture())
    fit = fit_pixels(pixels, "reinhard")
    stained = pixels[(pixels <= 219).all(1)].astype(np.float64)  # -ln(220 / 256) is 0.1516
    r, g, b = (stained.T + 1) / 256
    l, m, s = (  # noqa: E741 - the cones' names
        np.log(x * r + y * g + z * b)
        for x, y, z in ((0.3811, 0.5783, 0.0402), (0.1967, 0.7244, 0.0782), (0.0241, 0.1288, 0.8444))
    )
    lab = np.stack([(l + m + s) / 3**0.5, (l + m - 2 * s) / 6**0.5, (l - m) / 2**0.5], 1)
    assert fit.numbers == pytest.approx([*lab.mean(0), *lab.std(0)], abs=2e-6)


@pytest.mark.parametrize(
    ("pixels", "method", "message"),
    [
        (np.full((50_000, 3), 245, np.uint8), "macenko", f"0 px of its tissue are stained; at least {LEAST_PX}"),
        (painted(mixture(LEAST_PX - 1)), "reinhard", "px of its tissue are stained"),
        (painted(mixture() * [1, 0]), "macenko", "one stain only"),
        (painted(np.ones((5000, 2))), "reinhard", "one colour only"),
    ],
)
def test_what_cannot_be_measured_is_refused(pixels, method, message):
    with pytest.raises(NoStainFit, match=message):
        fit_pixels(pixels, method)


@pytest.mark.parametrize("method", ["macenko", "reinhard"])
def test_a_real_slide_has_the_stains_of_its_tissue(method):
    """Haematoxylin takes more red than eosin does; twice, and with more threads, the same numbers are found."""
    spec = SlideSpec("cmu", SVS)
    fits = []
    for threads in (1, 2):
        with spec.open() as slide:
            fits.append(fit_slide(slide, read_overview(slide, 8.0, threads), method))
    assert fits[0] == fits[1]
    if method == "macenko":
        haematoxylin, eosin = fits[0].stains
        assert haematoxylin == pytest.approx([0.65, 0.70, 0.29], abs=0.15)
        assert eosin == pytest.approx([0.07, 0.99, 0.11], abs=0.4)
        assert (fits[0].amounts > PUBLISHED["macenko"].amounts).all(), "it is darker than the reference"
    else:
        assert fits[0].mean[0] < PUBLISHED["reinhard"].mean[0]


def test_fits_of_a_folder_are_kept_and_slides_without_are_named_once(tmp_path):
    slides, out = tmp_path / "slides", tmp_path / "out"
    slides.mkdir(), out.mkdir()
    tissue = painted(mixture(256 * 256)[np.random.default_rng(1).permutation(256 * 256)]).reshape(256, 256, 3)
    cv2.imwrite(str(slides / "stained.png"), tissue[..., ::-1])
    cv2.imwrite(str(slides / "blank.png"), np.full((256, 256, 3), 244, np.uint8))
    cv2.imwrite(str(slides / "dark.png"), np.where(tissue < 60, tissue, 0))
    (slides / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\n none")
    specs = find_slides(slides, mpp=0.5)
    told = []
    fits = fit_slides(specs, "macenko", 8.0, out, workers=1, progress=told.append)
    assert {slide_id for slide_id, fit in fits.fits.items() if isinstance(fit, StainFit)} == {"stained"}
    failed = FailedSlides(out / "failed_slides.csv").rows()
    assert sorted((slide, step) for slide, step, _ in failed) == [(s, "stain") for s in ("blank", "broken", "dark")]
    reasons = {slide: reason for slide, _, reason in failed}
    assert "fluorescence" in reasons["dark"]
    assert all(reason.startswith("its colours are left as they are: ") for reason in reasons.values())
    assert told[-1].startswith("3 of 4 slides keep their colours")

    stored = json.loads((out / STAINS_FILE).read_text())
    stored["slides"]["stained"]["numbers"][0] = 0.5
    (out / STAINS_FILE).write_text(json.dumps(stored))
    again = fit_slides(specs, "macenko", 8.0, out, workers=1)
    assert again.fits["stained"] == StainFit("macenko", (0.5, *fits.fits["stained"].numbers[1:])), "it was not kept"
    assert sorted(FailedSlides(out / "failed_slides.csv").rows()) == sorted(failed)
    assert again.target("") == PUBLISHED["macenko"]
    assert again.target("stained") == again.target("stained.png") == again.fits["stained"]
    with pytest.raises(ValueError, match="stain-target blank cannot be the target: 0 px of its tissue"):
        again.target("blank")

    changed = [replace(spec, state=None) for spec in specs if spec.slide_id == "stained"]
    cv2.imwrite(str(slides / "stained.png"), tissue[:, ::-1, ::-1])
    anew = fit_slides(changed, "macenko", 8.0, out, workers=1).fits["stained"]
    assert anew.numbers == pytest.approx(fits.fits["stained"].numbers, abs=0.02)
    (out / STAINS_FILE).write_text("[]")
    with pytest.raises(ValueError, match="does not hold stains of slides"):
        StainFits.load(out / STAINS_FILE)


def test_an_interrupted_start_keeps_its_fits_and_an_accident_is_measured_again_unless_a_run_is_resumed(
    tmp_path, monkeypatch
):
    specs, fit, tried = [SlideSpec(name, SVS) for name in "abcd"], StainFit("macenko", (0.5,) * 8), []
    results = {"a": fit, "b": NoStainFit("one stain only"), "c": WorkerCrashed("SIGKILL")}

    def each(task, todo, workers, limits):
        for spec in todo:
            tried.append(spec.slide_id)
            if spec.slide_id not in results:
                raise KeyboardInterrupt
            yield spec, results[spec.slide_id]

    monkeypatch.setattr("pipelines.tiles.stain.map_isolated", each)
    with pytest.raises(KeyboardInterrupt):
        fit_slides(specs, "macenko", 8.0, tmp_path)
    results["d"] = fit
    begun = fit_slides(specs, "macenko", 8.0, tmp_path)
    results["c"] = fit
    assert fit_slides(specs, "macenko", 8.0, tmp_path, resumed=True).fits == begun.fits
    assert "SIGKILL" in begun.fits["c"]
    assert fit_slides(specs, "macenko", 8.0, tmp_path).fits == {"a": fit, "b": "one stain only", "c": fit, "d": fit}
    assert "".join(tried) == "abcd" + "cd" + "c"
    assert [row[:2] for row in FailedSlides(tmp_path / "failed_slides.csv").rows()] == [("b", "stain")]
