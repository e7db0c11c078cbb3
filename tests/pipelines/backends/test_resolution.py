"""What messages say about um/px that a file does not record, records absurdly, or records in another unit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile

from pipelines.backends.registry import open_slide
from pipelines.slides.slide import SlideError
from tests.helpers.format_files import write_ome_zarr
from tests.helpers.real import SVS

PIXELS = np.random.default_rng(0).integers(0, 255, (256, 256, 3), np.uint8)


def tiff(path: Path, **written: Any) -> Path:
    tifffile.imwrite(path, PIXELS, tile=(128, 128), photometric="rgb", **{"metadata": None} | written)
    return path


def ome(path: Path, unit: str) -> Path:
    about = {"axes": "YXS", "PhysicalSizeX": 0.25, "PhysicalSizeXUnit": unit, "PhysicalSizeY": 0.25}
    return tiff(path, metadata=about | {"PhysicalSizeYUnit": unit}, ome=True)


def zarr_slide(path: Path, unit: str | None) -> Path:
    write_ome_zarr(path, [PIXELS], "0.4")
    attributes = json.loads((path / ".zattrs").read_text())
    for axis in attributes["multiscales"][0]["axes"][1:]:
        axis.pop("unit") if unit is None else axis.update(unit=unit)
    (path / ".zattrs").write_text(json.dumps(attributes))
    return path


def svs(path: Path, mpp: bytes) -> Path:
    path.write_bytes(SVS.read_bytes().replace(b"|MPP = 0.4990", mpp, 1))
    return path


NONE, PRINTER, UNIT = "does not record its um/px", "screen or a printer", "a unit that is not read"


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (lambda f: tiff(f / "a.tif"), NONE),
        (lambda f: tiff(f / "a.tif", resolution=(1, 1), resolutionunit="NONE"), NONE),
        (lambda f: tiff(f / "a.tif", resolution=(96, 96), resolutionunit="INCH"), f"records 264.58 um/px.*{PRINTER}"),
        (lambda f: tiff(f / "a.tif", resolution=(300, 300), resolutionunit="INCH"), f"records 84.67 um/px.*{PRINTER}"),
        (lambda f: tiff(f / "a.tif", resolution=(20_000, 20_000), resolutionunit="NONE"), "20000 px in a unit that"),
        (lambda f: ome(f / "a.ome.tif", "pixel"), f"0.25 in 'pixel', {UNIT}"),
        (lambda f: ome(f / "a.ome.tif", "mm"), "records 250 um/px; a slide has"),
        (lambda f: zarr_slide(f / "a.zarr", None), NONE),
        (lambda f: zarr_slide(f / "a.zarr", "parsec"), f"'parsec', {UNIT}"),
        (lambda f: svs(f / "a.svs", b"|XXX = 0.4990"), NONE),
        (lambda f: svs(f / "a.svs", b"|MPP = fourty"), "'fourty' um/px, which is no number"),
        (lambda f: svs(f / "a.svs", b"|MPP = 264.58"), "records 264.58 um/px; a slide has"),
    ],
)
def test_the_message_says_what_the_file_records(tmp_path: Path, made: Any, said: str) -> None:
    path = made(tmp_path)
    with pytest.raises(SlideError, match=rf"{said}.*--slide-mpp.*`mpp` of --mpp-table"):
        open_slide(path)
    with open_slide(path, mpp=0.25) as slide:
        assert slide.mpp == 0.25
