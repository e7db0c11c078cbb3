"""A thousand rounds of opening and reading leave memory where it was, for every backend.

Each backend is measured in a process of its own, where nothing else allocates.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.helpers.real import DICOM, NDPI, PYRAMID_TIFF, SVS
from tests.pipelines.backends.test_slides import write_ome_zarr

pytestmark = pytest.mark.process

GROWTH_LIMIT_BYTES = 4 << 20

PROGRAM = """
import gc, sys
import psutil
from pathlib import Path
from pipelines.slides.geometry import Region
from pipelines.backends.registry import open_slide

path, backend, rounds = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
process = psutil.Process()
for i in range(rounds + rounds // 5):
    if i == rounds // 5:  # warm: libraries loaded, buffers and caches at their size
        gc.collect()
        before = process.memory_info().rss
    with open_slide(path, mpp=0.5, backend=backend) as slide:
        slide.read(Region(40 * (i % 10), 30 * (i % 7), 64, 64, 0.5 if i % 2 else 1.3))
gc.collect()
print(process.memory_info().rss - before, process.num_fds())
"""


@pytest.mark.parametrize("backend", ["tiled", "tiled pyramid", "ndpi", "openslide", "openslide dicom", "zarr", "image"])
def test_no_growth_over_a_thousand_rounds(tmp_path: Path, backend: str) -> None:
    files = {
        "tiled": SVS,
        "tiled pyramid": PYRAMID_TIFF,
        "ndpi": NDPI,
        "openslide": SVS,
        "openslide dicom": DICOM,
        "zarr": tmp_path / "slide.zarr",
        "image": tmp_path / "image.png",
    }
    if backend == "zarr":
        write_ome_zarr(files[backend], version="0.4", axes="cyx")
    Image.fromarray(np.full((300, 400, 3), 90, np.uint8)).save(files["image"])
    name = backend.split()[0]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(files[backend]), name, "1000"],
        capture_output=True, text=True, check=True, timeout=240,
    )  # fmt: skip
    growth_bytes, open_files = map(int, done.stdout.split())
    assert growth_bytes < GROWTH_LIMIT_BYTES
    assert open_files < 40
