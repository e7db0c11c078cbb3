"""Slide files with several images, and what they record as um/px of level 0."""

import json

import numpy as np
import pytest
import tifffile
import zarr

from pipelines.backends.registry import open_slide, other_images
from pipelines.slides.geometry import Region
from pipelines.slides.slide import SlideError
from tests.helpers.format_files import write_ome_zarr
from tests.helpers.real import SVS
from tests.helpers.tiff_damage import with_bytes

RANDOM = np.random.default_rng(0)
LARGE = RANDOM.integers(0, 256, (400, 512, 3), np.uint8)
HALF = LARGE[::2, ::2]
SECOND = RANDOM.integers(0, 256, (384, 400, 3), np.uint8)
SMALL = RANDOM.integers(0, 256, (64, 80, 3), np.uint8)
STRIPS, TILES = {}, {"tile": (64, 64)}


def write_tiff(path, *images, ome=False):
    """Write pixels with the writer's options, at um/px; with ``ome`` the option ``name`` goes into the metadata."""
    with tifffile.TiffWriter(path, ome=ome) as file:
        for pixels, options, mpp in images:
            kept = dict(options)
            if ome:
                size = {f"PhysicalSize{axis}{what}": v for axis in "XY" for what, v in (("", mpp), ("Unit", "µm"))}
                kept["metadata"] = {"axes": "YXS", **size, "Name": kept.pop("name", "")}
            else:
                kept |= {"resolution": (1e4 / mpp,) * 2, "resolutionunit": "CENTIMETER", "metadata": None}
            file.write(pixels, photometric="rgb", **kept)


def read_level0(path, **how):
    with open_slide(path, **how) as slide:
        level = slide.levels[0]
        return slide.read(Region(0, 0, level.width, level.height, slide.mpp)), slide.mpp, slide.backend


def named(options, text):
    return options | {"description": text}


def ome_named(options, name):
    return options | {"name": name}


APERIO = "Aperio Image Library v1\n"
ABOUT = f"{APERIO}512x400 (64x64)|MPP = 0.5"
OME_SLIDE = (LARGE, ome_named(TILES, "slide"), 0.5)
TALL = np.tile(LARGE, (2, 1, 1))
CASES = {
    "label first": ([(SMALL, TILES, 8.0), (LARGE, TILES, 0.5)], "tiled", "80 x 64 px"),
    "thumbnail in strips first": ([(SMALL, STRIPS, 2.0), (LARGE, TILES, 0.5)], "tiled", "80 x 64 px"),
    "thumbnail in tiles first": ([(SMALL, TILES, 2.0), (LARGE, STRIPS, 0.5)], "image", "80 x 64 px"),
    "all in strips": ([(SMALL, STRIPS, 2.0), (LARGE, STRIPS, 0.5)], "image", "80 x 64 px"),
    "a level without its mark": ([(LARGE, TILES, 0.5), (HALF, TILES, 1.0)], "tiled", "256 x 200 px"),
    "label of similar size": (
        [(SECOND, named(TILES, "Label image"), 0.5), (LARGE, TILES, 0.5)],
        "tiled",
        "'Label image' 400 x 384 px",
    ),
    "SVS label first": (
        [
            (SMALL, named(STRIPS, f"{APERIO}label 80x64"), 8.0),
            (LARGE, named(TILES, ABOUT), 0.5),
            (HALF, named(TILES, ABOUT), 1.0),
        ],
        "tiled",
        "'label' 80 x 64 px",
    ),
    "OME label first": ([(SMALL, ome_named(TILES, "label"), 10.0), OME_SLIDE], "tiled", "'label' 80 x 64 px"),
    "OME macro that is the largest": (
        [(TALL, ome_named(TILES, "macro image"), 2.0), OME_SLIDE],
        "tiled",
        "'macro image' 512 x 800 px",
    ),
    "OME thumbnail in strips": (
        [(SMALL, ome_named(STRIPS, "a_thumbnail"), 2.0), OME_SLIDE],
        "tiled",
        "'a_thumbnail' 80 x 64 px",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_slide_is_the_largest_image(tmp_path, case):
    images, backend, other = CASES[case]
    write_tiff(tmp_path / "a.tif", *images, ome=case.startswith("OME"))
    pixels, mpp, used = read_level0(tmp_path / "a.tif")
    np.testing.assert_array_equal(pixels, LARGE)
    assert (mpp, used) == (pytest.approx(0.5), backend)
    assert other_images(tmp_path / "a.tif") == [other]
    for options in ({"mpp": 0.25}, {"scene": 7}):  # there is no choice of a scene
        np.testing.assert_array_equal(read_level0(tmp_path / "a.tif", **options)[0], LARGE)


@pytest.mark.parametrize("ome", [True, False])
@pytest.mark.parametrize("kind", [STRIPS, TILES])
def test_scenes_of_similar_size_are_chosen_by_number(tmp_path, ome, kind):
    path, names = tmp_path / "a.tif", ("label", "left", "right")
    images = [(SMALL, 8.0), (SECOND, 0.25), (LARGE, 0.5)]
    kinds = [ome_named(kind, name) if ome else kind for name in names]
    write_tiff(path, *((pixels, kind, mpp) for (pixels, mpp), kind in zip(images, kinds, strict=True)), ome=ome)
    with pytest.raises(SlideError, match=r"0: .*400 x 384 px, 1: .*512 x 400 px.*--scene N"):
        open_slide(path, mpp=0.5)
    for scene, (expected, expected_mpp) in enumerate(images[1:]):
        pixels, mpp, _ = read_level0(path, scene=scene)
        np.testing.assert_array_equal(pixels, expected)
        assert mpp == pytest.approx(expected_mpp)
        assert len(other_images(path, scene)) == 2
    with pytest.raises(SlideError, match="no scene 2"):
        open_slide(path, mpp=0.5, scene=2)


@pytest.mark.parametrize("second", [SECOND, SECOND[::2, ::2]], ids=["similar", "smaller than a level of the first"])
def test_levels_are_those_of_the_scene(tmp_path, second):
    reduced = TILES | {"subfiletype": 1}
    scenes = (LARGE, TILES, 0.5), (HALF, reduced, 1.0), (second, TILES, 0.5), (second[::2, ::2], reduced, 1.0)
    write_tiff(tmp_path / "a.tif", *scenes)
    for scene, expected in enumerate((LARGE, second)):
        with open_slide(tmp_path / "a.tif", scene=scene) as slide:
            for level, pixels in zip(slide.levels, (expected, expected[::2, ::2]), strict=True):
                got = slide.read(Region(0, 0, level.width, level.height, level.mpp))
                np.testing.assert_array_equal(got, pixels)


def test_an_svs_with_a_tiled_image_of_other_proportions_is_refused(tmp_path):
    write_tiff(tmp_path / "a.svs", *((pixels, named(TILES, ABOUT), 0.5) for pixels in (LARGE, HALF, SECOND)))
    with pytest.raises(SlideError, match=r"512 x 400, 256 x 200, 400 x 384 px\) are not one image made smaller"):
        open_slide(tmp_path / "a.svs")


def write_collection(path, *images):
    """Write the layout of bioformats2raw: images in groups 0, 1, ..."""
    root = zarr.open_group(path, mode="w", zarr_format=2)
    root.attrs["bioformats2raw.layout"] = 3
    axes = [{"name": n, "type": "space", "unit": "micrometer"} for n in "yx"] + [{"name": "c", "type": "channel"}]
    scale = [{"type": "scale", "scale": [0.5, 0.5, 1.0]}]
    for number, (name, pixels) in enumerate(images):
        group = root.create_group(str(number))
        group.create_array("0", data=pixels, chunks=(64, 64, 3))
        datasets = [{"path": "0", "coordinateTransformations": scale}]
        group.attrs["multiscales"] = [{"version": "0.4", "name": name, "axes": axes, "datasets": datasets}]


def test_zarr_collections(tmp_path):
    write_collection(tmp_path / "one.zarr", ("label", SMALL), ("slide", LARGE))
    np.testing.assert_array_equal(read_level0(tmp_path / "one.zarr")[0], LARGE)
    assert other_images(tmp_path / "one.zarr") == ["'label' 80 x 64 px"]
    write_collection(tmp_path / "two.zarr", ("left", SECOND), ("right", LARGE))
    with pytest.raises(SlideError, match=r"0: 'left' 400 x 384 px, 1: 'right'.*--scene"):
        open_slide(tmp_path / "two.zarr")
    np.testing.assert_array_equal(read_level0(tmp_path / "two.zarr", scene=1)[0], LARGE)


def tiff(path, **written):
    tifffile.imwrite(path, HALF, tile=(128, 128), photometric="rgb", **{"metadata": None} | written)
    return path


def ome(path, unit):
    about = {"axes": "YXS", "PhysicalSizeX": 0.25, "PhysicalSizeXUnit": unit, "PhysicalSizeY": 0.25}
    return tiff(path, metadata=about | {"PhysicalSizeYUnit": unit}, ome=True)


def zarr_slide(path, unit):
    write_ome_zarr(path, [HALF])
    attributes = json.loads((path / ".zattrs").read_text())
    for axis in attributes["multiscales"][0]["axes"][1:]:
        axis.pop("unit") if unit is None else axis.update(unit=unit)
    (path / ".zattrs").write_text(json.dumps(attributes))
    return path


NONE, PRINTER, UNIT = "does not record its um/px", "screen or a printer", "a unit that is not read"


@pytest.mark.parametrize(
    ("made", "words"),
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
        (
            lambda f: with_bytes(SVS, f / "a.svs", SVS.read_bytes().index(b"|MPP = 0.4990"), b"|MPP = fourty"),
            "'fourty' um/px, which is no number",
        ),
    ],
)
def test_the_message_says_what_the_file_records(tmp_path, made, words):
    path = made(tmp_path)
    with pytest.raises(SlideError, match=rf"{words}.*--slide-mpp.*`mpp` of --mpp-table"):
        open_slide(path)
    with open_slide(path, mpp=0.25) as slide:
        assert slide.mpp == 0.25


def test_a_given_mpp_that_contradicts_the_file_is_reported_once(tmp_path, caplog):
    path = tiff(tmp_path / "a.tif", resolution=(20_000, 20_000), resolutionunit="CENTIMETER")
    for mpp in (0.51, 0.25, 0.25):
        open_slide(path, mpp=mpp).close()
    (warning,) = caplog.messages
    assert "a.tif: the file records 0.5 um/px; it is read as 0.25, given by --slide-mpp" in warning


def test_entities_of_the_ome_xml_are_decoded(tmp_path):
    path = tmp_path / "a.ome.tif"
    write_tiff(path, (SMALL, ome_named(TILES, "A & B"), 10.0), OME_SLIDE, ome=True)
    assert other_images(path) == ["'A & B' 80 x 64 px"]
    path.write_bytes(ome(path, "unit: m").read_bytes().replace(b"unit: m", b"&#181;m"))
    assert read_level0(path)[1] == 0.25
