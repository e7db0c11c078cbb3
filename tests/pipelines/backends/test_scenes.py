"""Slide files with several images, padding outside a level, and um/px of level 0."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
import zarr
from hypothesis import given
from hypothesis import strategies as st

from pipelines.backends.level_reader import pad
from pipelines.backends.registry import open_slide, other_images
from pipelines.slides.geometry import Region
from pipelines.slides.slide import PADDING, SlideError
from tests.helpers.format_files import write_ome_zarr
from tests.helpers.real import SVS

RANDOM = np.random.default_rng(0)
LARGE = RANDOM.integers(0, 256, (400, 512, 3), np.uint8)
SECOND = RANDOM.integers(0, 256, (384, 400, 3), np.uint8)
SMALL = RANDOM.integers(0, 256, (64, 80, 3), np.uint8)
STRIPS: dict[str, Any] = {}
TILES: dict[str, Any] = {"tile": (64, 64)}
APERIO = "Aperio Image Library v1\n"


def write_tiff(path: Path, *images: tuple[np.ndarray, dict[str, Any], float], ome: bool = False) -> None:
    """Write pixels with the writer's options, at um/px; names come through the options' metadata or description."""
    with tifffile.TiffWriter(path, ome=ome) as file:
        for pixels, options, mpp in images:
            kept = dict(options)
            if ome:
                sizes = {f"PhysicalSize{axis}": mpp for axis in "XY"} | {
                    f"PhysicalSize{axis}Unit": "µm" for axis in "XY"
                }
                kept["metadata"] = {"axes": "YXS", **sizes, "Name": kept.pop("name", "")}
            else:
                kept |= {"resolution": (1e4 / mpp,) * 2, "resolutionunit": "CENTIMETER", "metadata": None}
            file.write(pixels, photometric="rgb", **kept)


def read_level0(path: Path, **how: Any) -> tuple[np.ndarray, float, str]:
    with open_slide(path, **how) as slide:
        level = slide.levels[0]
        return slide.read(Region(0, 0, level.width, level.height, slide.mpp)), slide.mpp, slide.backend


CASES: dict[str, tuple[bool, list[tuple[np.ndarray, dict[str, Any], float]], str, list[str]]] = {
    "label first, by size": (False, [(SMALL, TILES, 8.0), (LARGE, TILES, 0.5)], "tiled", ["80 x 64 px"]),
    "thumbnail in strips first": (False, [(SMALL, STRIPS, 2.0), (LARGE, TILES, 0.5)], "tiled", ["80 x 64 px"]),
    "thumbnail in tiles first": (False, [(SMALL, TILES, 2.0), (LARGE, STRIPS, 0.5)], "image", ["80 x 64 px"]),
    "all in strips": (False, [(SMALL, STRIPS, 2.0), (LARGE, STRIPS, 0.5)], "image", ["80 x 64 px"]),
    "a level without its mark": (
        False,
        [(LARGE, TILES, 0.5), (LARGE[::2, ::2], TILES, 1.0)],
        "tiled",
        ["256 x 200 px"],
    ),
    "label of similar size, by description": (
        False,
        [(SECOND, TILES | {"description": "Label image"}, 0.5), (LARGE, TILES, 0.5)],
        "tiled",
        ["'Label image' 400 x 384 px"],
    ),
    "SVS label first": (
        False,
        [
            (SMALL, STRIPS | {"description": f"{APERIO}label 80x64"}, 8.0),
            (LARGE, TILES | {"description": f"{APERIO}512x400 (64x64)|MPP = 0.5"}, 0.5),
            (LARGE[::2, ::2], TILES | {"description": f"{APERIO}512x400 (64x64)|MPP = 0.5"}, 1.0),
        ],
        "tiled",
        ["'label' 80 x 64 px"],
    ),
    "OME label first": (
        True,
        [(SMALL, TILES | {"name": "label"}, 10.0), (LARGE, TILES | {"name": "slide"}, 0.5)],
        "tiled",
        ["'label' 80 x 64 px"],
    ),
    "OME macro that is the largest": (
        True,
        [(np.tile(LARGE, (2, 1, 1)), TILES | {"name": "macro image"}, 2.0), (LARGE, TILES | {"name": "slide"}, 0.5)],
        "tiled",
        ["'macro image' 512 x 800 px"],
    ),
    "OME thumbnail in strips": (
        True,
        [(SMALL, STRIPS | {"name": "a_thumbnail"}, 2.0), (LARGE, TILES | {"name": "slide"}, 0.5)],
        "tiled",
        ["'a_thumbnail' 80 x 64 px"],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_slide_is_the_largest_image(tmp_path: Path, case: str) -> None:
    ome, images, backend, others = CASES[case]
    write_tiff(tmp_path / "a.tif", *images, ome=ome)
    pixels, mpp, used = read_level0(tmp_path / "a.tif")
    np.testing.assert_array_equal(pixels, LARGE)
    assert (mpp, used) == (pytest.approx(0.5), backend)
    assert other_images(tmp_path / "a.tif") == others
    with_mpp, _, _ = read_level0(tmp_path / "a.tif", mpp=0.25)
    np.testing.assert_array_equal(with_mpp, LARGE)
    with_scene, _, _ = read_level0(tmp_path / "a.tif", scene=7)  # there is no choice
    np.testing.assert_array_equal(with_scene, LARGE)


@pytest.mark.parametrize("ome", [True, False])
@pytest.mark.parametrize("kind", [STRIPS, TILES])
def test_scenes_of_similar_size_are_chosen_by_number(tmp_path: Path, ome: bool, kind: dict[str, Any]) -> None:
    names = ("label", "left", "right") if ome else ("", "", "")
    images = [(SMALL, kind, 8.0), (SECOND, kind, 0.25), (LARGE, kind, 0.5)]
    named = [(p, o | {"name": name} if ome else o, mpp) for (p, o, mpp), name in zip(images, names, strict=True)]
    write_tiff(tmp_path / "a.tif", *named, ome=ome)
    with pytest.raises(SlideError, match=r"0: .*400 x 384 px, 1: .*512 x 400 px.*--scene N"):
        open_slide(tmp_path / "a.tif", mpp=0.5)
    for scene, (expected, expected_mpp) in enumerate(((SECOND, 0.25), (LARGE, 0.5))):
        pixels, mpp, _ = read_level0(tmp_path / "a.tif", scene=scene)
        np.testing.assert_array_equal(pixels, expected)
        assert mpp == pytest.approx(expected_mpp)
        assert len(other_images(tmp_path / "a.tif", scene)) == 2
    with pytest.raises(SlideError, match="no scene 2"):
        open_slide(tmp_path / "a.tif", mpp=0.5, scene=2)


def test_levels_are_those_of_the_scene(tmp_path: Path) -> None:
    reduced = TILES | {"subfiletype": 1}
    large, second = (LARGE, TILES, 0.5), (SECOND, TILES, 0.5)
    write_tiff(tmp_path / "a.tif", large, (LARGE[::2, ::2], reduced, 1.0), second, (SECOND[::2, ::2], reduced, 1.0))
    for scene, expected in enumerate((LARGE, SECOND)):
        with open_slide(tmp_path / "a.tif", scene=scene) as slide:
            assert [(level.height, level.width) for level in slide.levels] == [
                expected.shape[:2],
                expected[::2, ::2].shape[:2],
            ]
            level = slide.levels[1]
            pixels = slide.read(Region(0, 0, level.width, level.height, level.mpp))
            np.testing.assert_array_equal(pixels, expected[::2, ::2])


def write_collection(path: Path, *images: tuple[str, np.ndarray]) -> None:
    """Write the layout of bioformats2raw: images in groups 0, 1, ..."""
    root = zarr.open_group(path, mode="w", zarr_format=2)
    root.attrs["bioformats2raw.layout"] = 3
    for number, (name, pixels) in enumerate(images):
        group = root.create_group(str(number))
        array = group.create_array("0", shape=pixels.shape, chunks=(64, 64, 3), dtype="u1")
        array[:] = pixels
        axes = [{"name": n, "type": "space", "unit": "micrometer"} for n in "yx"] + [{"name": "c", "type": "channel"}]
        scale = [{"type": "scale", "scale": [0.5, 0.5, 1.0]}]
        datasets = [{"path": "0", "coordinateTransformations": scale}]
        group.attrs["multiscales"] = [{"version": "0.4", "name": name, "axes": axes, "datasets": datasets}]


def test_zarr_collections(tmp_path: Path) -> None:
    write_collection(tmp_path / "one.zarr", ("label", SMALL), ("slide", LARGE))
    np.testing.assert_array_equal(read_level0(tmp_path / "one.zarr")[0], LARGE)
    assert other_images(tmp_path / "one.zarr") == ["'label' 80 x 64 px"]
    write_collection(tmp_path / "two.zarr", ("left", SECOND), ("right", LARGE))
    with pytest.raises(SlideError, match=r"0: 'left' 400 x 384 px, 1: 'right'.*--scene"):
        open_slide(tmp_path / "two.zarr")
    np.testing.assert_array_equal(read_level0(tmp_path / "two.zarr", scene=1)[0], LARGE)


edges = st.integers(-12, 25)
sizes = st.integers(1, 12)


@given(edges, edges, sizes, sizes, sizes, sizes)
def test_inside_is_left_alone_and_outside_is_white(
    l_x: int, l_y: int, width: int, height: int, l_width: int, l_height: int
) -> None:
    out = np.zeros((height, width, 3), np.uint8)
    inside = pad(out, l_x, l_y, l_width, l_height)
    within = np.array(
        [[0 <= l_x + x < l_width and 0 <= l_y + y < l_height for x in range(width)] for y in range(height)]
    )
    assert ((out == PADDING).all(axis=2) == ~within).all()
    if not within.any():
        assert inside is None
        return
    assert inside is not None
    assert inside.out.base is out
    inside.out[...] = 1
    assert ((out == 1).all(axis=2) == within).all()
    y, x = np.argwhere(within)[0]
    assert (inside.l_x, inside.l_y) == (l_x + x, l_y + y)


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
