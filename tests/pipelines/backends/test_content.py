"""Files that are not what their suffix says are refused by name, whatever mpp is given; what they are is opened."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tifffile
from PIL import Image

from pipelines.backends.registry import open_slide
from pipelines.slides.geometry import Bounds
from pipelines.slides.slide import SlideError
from tests.helpers.mrxs_file import write_mrxs

PIXELS = np.random.default_rng(0).integers(0, 256, (256, 256, 3), np.uint8)


def write(path: Path, kind: str) -> Path:
    if kind == "strips":
        tifffile.imwrite(path, PIXELS, photometric="rgb", rowsperstrip=64)
    elif kind == "tiles":
        tifffile.imwrite(path, PIXELS, photometric="rgb", tile=(64, 64))
    elif kind == "DICOM":
        path.write_bytes(bytes(128) + b"DICM" + bytes(64))
    else:
        Image.fromarray(PIXELS).save(path, kind)
    return path


@pytest.mark.parametrize("backend", ["auto", "image"])
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *(
            (f"a{suffix}", "JPEG")
            for suffix in (".svs", ".ndpi", ".scn", ".bif", ".svslide", ".qptiff", ".vms", ".dcm")
        ),
        *((f"a{suffix}", "PNG") for suffix in (".svs", ".tif", ".tiff", ".btf", ".SVS")),
        ("a.svs", "BMP"),
        ("a.dcm", "tiles"),
        ("a.svslide", "tiles"),
        ("a.svs", "DICOM"),
        ("a.svs", "strips"),
        ("a.ndpi", "strips"),
    ],
)
def test_other_content_than_the_suffix_says(tmp_path: Path, name: str, kind: str, backend: str) -> None:
    path = write(tmp_path / name, kind)
    with pytest.raises(SlideError, match=rf"{path}: named {path.suffix.lower()}"):
        open_slide(path, mpp=0.25, backend=backend)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "tiles", "strips"])
@pytest.mark.parametrize("has_empty_folder", [False, True])
def test_an_mrxs_file_without_its_data(tmp_path: Path, kind: str, has_empty_folder: bool) -> None:
    path = write(tmp_path / "case.mrxs", kind)
    if has_empty_folder:
        (tmp_path / "case").mkdir()
    with pytest.raises(SlideError, match=r"MRXS slide without .*case"):
        open_slide(path, mpp=0.25)


@pytest.mark.parametrize(
    ("name", "kind", "backend"),
    [
        ("a.png", "JPEG", "image"),
        ("a.jpg", "PNG", "image"),
        ("a.tif", "strips", "image"),
        ("a.svs", "tiles", "tiled"),
        ("a.ndpi", "tiles", "tiled"),
        ("noname", "JPEG", "image"),
    ],
)
def test_content_that_the_suffix_allows(tmp_path: Path, name: str, kind: str, backend: str) -> None:
    with open_slide(write(tmp_path / name, kind), mpp=0.25) as slide:
        assert slide.backend == backend


def test_a_whole_mrxs_slide(tmp_path: Path) -> None:
    write_mrxs(tmp_path / "case.mrxs", np.tile(PIXELS, (2, 2, 1)), Bounds(260, 4, 256, 256))
    with open_slide(tmp_path / "case.mrxs") as slide:
        assert slide.backend == "openslide"
