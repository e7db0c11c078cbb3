"""A million vertices drawn on a slide: seconds to read the file, microseconds for the mask of a tile after that.

Takes nothing; makes two drawings on a slide of 100,000 px, many nuclei and one ragged outline, as GeoJSON and as ASAP
XML, and asks for masks of tiles at random places. Next to it the usual way: shapely's STRtree and OpenCV's fillPoly.

    python -m benchmarks.annotations.run [--vertices 1000000] [--tiles 200] [--write]
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import cv2
import numpy as np
import shapely
from numpy.typing import NDArray

from benchmarks.results import markdown_table, parser_of, publish, results
from pipelines.backends.level_reader import MemoryReader
from pipelines.catalog.catalog import SlideSpec
from pipelines.labels.annotation_files import AnnotationFiles, read_annotation
from pipelines.labels.annotations import read_annotations
from pipelines.labels.conversion import write_areas
from pipelines.labels.drawing import Origin, PolygonSet, make_polygon_set
from pipelines.slides.geometry import Region, levels_from_sizes
from pipelines.slides.pyramid import PyramidSlide

SIDE = 100_000
"""Of the slide in px, at 0.5 um/px."""
NUCLEUS_POINTS = 20
TILES = (512, 2048)
FILES = (("GeoJSON", ".geojson"), ("ASAP XML", ".xml"))


def nuclei(vertices: int, rng: np.random.Generator) -> list[list[NDArray[np.float64]]]:
    """Polygons of ``NUCLEUS_POINTS`` points, about 14 px in radius, anywhere."""
    count = vertices // NUCLEUS_POINTS
    turn = np.linspace(0, 2 * np.pi, NUCLEUS_POINTS, endpoint=False)
    radius = rng.uniform(8, 20, (count, 1)) * (1 + 0.1 * rng.standard_normal((count, NUCLEUS_POINTS)))
    around = np.stack([radius * np.cos(turn), radius * np.sin(turn)], axis=-1)
    return [[ring] for ring in rng.uniform(50, SIDE - 50, (count, 1, 2)) + around]


def outline(vertices: int, rng: np.random.Generator) -> list[list[NDArray[np.float64]]]:
    """One ragged polygon about most of the slide."""
    turn = np.linspace(0, 2 * np.pi, vertices, endpoint=False)
    radius = 0.4 * SIDE * (1 + 0.1 * np.sin(7 * turn)) + rng.uniform(-5, 5, vertices)
    return [[SIDE / 2 + np.stack([radius * np.cos(turn), radius * np.sin(turn)], axis=-1)]]


def write_asap(polygons: list[list[NDArray[np.float64]]], path: Path) -> None:
    """Write polygons without holes as ASAP does."""
    with path.open("w") as file:
        file.write("<ASAP_Annotations><Annotations>\n")
        for (ring,) in polygons:
            points = "".join(f'<Coordinate X="{x!r}" Y="{y!r}"/>\n' for x, y in ring.tolist())
            file.write(f'<Annotation Type="Polygon" PartOfGroup="nucleus">{points}</Annotation>\n')
        file.write("</Annotations></ASAP_Annotations>\n")


def tile_times(read: Callable[[int, int, NDArray[np.uint8]], None], tile: int, tiles: int) -> list[float]:
    """Microseconds of each of ``tiles`` masks at random places."""
    out = np.empty((tile, tile), np.uint8)
    taken = []
    for l0_x, l0_y in np.random.default_rng(1).integers(0, SIDE - tile, (tiles, 2)).tolist():
        begun = time.perf_counter()
        read(l0_x, l0_y, out)
        taken.append((time.perf_counter() - begun) * 1e6)
    return taken


def tree_reader(drawing: PolygonSet) -> Callable[[int, int, NDArray[np.uint8]], None]:
    """Masks by shapely's STRtree and OpenCV's fillPoly, whose coordinates are whole px."""
    rings = [np.rint(drawing.rings(k)[0]).astype(np.int32) for k in range(len(drawing.box))]
    tree = shapely.STRtree(shapely.box(*drawing.box.T))

    def read(l0_x: int, l0_y: int, out: NDArray[np.uint8]) -> None:
        out[:] = 0
        for k in tree.query(shapely.box(l0_x, l0_y, l0_x + len(out), l0_y + len(out))):
            cv2.fillPoly(out, [rings[k] - np.array([l0_x, l0_y], np.int32)], 1)

    return read


def measured(folder: Path, name: str, polygons: list[list[NDArray[np.float64]]], tiles: int) -> list[tuple[str, ...]]:
    """Rows of the table for one drawing: one for each file, and one for the usual way."""
    white = MemoryReader([np.broadcast_to(np.full((1, 1, 3), 255, np.uint8), (SIDE, SIDE, 3))])
    slide = PyramidSlide(Path("memory"), white, levels_from_sizes([(SIDE, SIDE)], 0.5))
    specs = (SlideSpec("slide", folder / "slide.svs"),)
    drawing = make_polygon_set(polygons, ["nucleus"] * len(polygons), {}, Origin.LEVEL0)
    rows = []
    for title, suffix in FILES:
        path = folder / f"slide{suffix}"
        if suffix == ".xml":
            write_asap(polygons, path)
        else:
            write_areas(drawing, path, None)
        begun = time.perf_counter()
        read = read_annotation(path)
        load_s = time.perf_counter() - begun
        assert isinstance(read, PolygonSet)
        truth = read_annotations(AnnotationFiles({"slide": path}, (), path.name), specs, {"slide": "slide"})

        def mask(l0_x: int, l0_y: int, out: NDArray[np.uint8], truth=truth) -> None:
            height, width = out.shape
            truth.read_mask("slide", slide, Region(l0_x, l0_y, width, height, 0.5), out)

        times = [_shown(tile_times(mask, tile, tiles)) for tile in TILES]
        rows.append(
            (
                f"{name}, {title}",
                f"{path.stat().st_size / 1e6:.0f}",
                f"{load_s:.1f}",
                f"{read.nbytes / 1e6:.0f}",
                *times,
            )
        )
    begun = time.perf_counter()
    read_tile = tree_reader(drawing)
    build_s = time.perf_counter() - begun
    times = [_shown(tile_times(read_tile, tile, tiles)) for tile in TILES]
    rows.append((f"{name}, STRtree + fillPoly", "", f"+{build_s:.1f}", "", *times))
    return rows


def _shown(times_us: list[float]) -> str:
    return f"{statistics.median(times_us):,.0f} ({statistics.quantiles(times_us, n=20)[-1]:,.0f})"


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--vertices", type=int, default=1_000_000, help="of each drawing")
    parser.add_argument("--tiles", type=int, default=200, help="masks asked for, of each size")
    arguments = parser.parse_args()
    cv2.setNumThreads(1)
    rng = np.random.default_rng(0)
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        count = arguments.vertices // NUCLEUS_POINTS
        lines += measured(Path(folder), f"{count:,} nuclei", nuclei(arguments.vertices, rng), arguments.tiles)
        lines += measured(Path(folder), "one outline", outline(arguments.vertices, rng), arguments.tiles)
    header = ("drawing", "file, MB", "load, s", "held, MB", *(f"mask of {tile} px, us" for tile in TILES))
    told = f"{arguments.vertices:,} vertices in each; {arguments.tiles} tiles, median (95th percentile).\n"
    text = results(markdown_table(header, lines), told)
    publish(__file__, text, arguments.write)


if __name__ == "__main__":
    main()
