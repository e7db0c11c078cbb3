"""DICOM Segmentations as labels of slides: which slide they belong to, where on it they lie, what their classes are."""

import numpy as np
import pydicom
import pytest
import tifffile
from PIL import Image

from pipelines.catalog.catalog import find_slides
from pipelines.labels.conversion import read_areas
from pipelines.labels.slide_labels import find_labels
from pipelines.slides.geometry import Bounds, Region
from pipelines.slides.slide import SlideError
from tests.helpers.dicom_file import write_dicom_slide
from tests.helpers.drawings import annotations_in, blank_slide, mask_of
from tests.helpers.segmentation_file import add_placement, write_segmentation

VALUES = (np.add.outer(np.arange(150) // 23, np.arange(190) // 31) % 4).astype(np.uint8)
NAMES = {1: "fat", 2: "stroma", 3: "tumour"}
WHOLE = Region(0, 0, 190, 150, 0.5)
PIXELS = np.random.default_rng(0).integers(0, 256, (150, 190, 3), np.uint8)


@pytest.fixture
def case7(tmp_path):
    """The folder of a DICOM slide of two levels, as an archive leaves it, and a segmentation of its series."""
    folder = tmp_path / "slides" / "case7"
    paths = write_dicom_slide(folder, [PIXELS, PIXELS[::2, ::2]], encoding="raw", tile=32)
    for path in paths:
        dataset = pydicom.dcmread(path)
        add_placement(dataset)
        dataset.save_as(path)
    write_segmentation(folder / "1.2.826.99.dcm", VALUES, NAMES, slide=paths[0])
    return folder


@pytest.mark.parametrize("reduced", [1, 2])
@pytest.mark.parametrize("kind", ["BINARY", "LABELMAP"])
def test_labels_are_those_of_the_mask_tiff_of_the_same_array(tmp_path, kind, reduced):
    values = VALUES[::reduced, ::reduced]
    write_segmentation(tmp_path / "seg" / "a.dcm", values, NAMES, kind, "TILED_SPARSE", mpp=0.5 * reduced)
    (tmp_path / "tiff").mkdir()
    tifffile.imwrite(tmp_path / "tiff" / "a.tif", values, tile=(64, 64), compression="deflate")
    (tmp_path / "tiff" / "classes.txt").write_text("".join(f"{number} {name}\n" for number, name in NAMES.items()))
    slide = blank_slide(190, 150)
    seg, tiff = (annotations_in(tmp_path / name, "a") for name in ("seg", "tiff"))
    assert seg.classes == tiff.classes == ("background", "fat", "stroma", "tumour")
    for region in (Region(0, 0, 190, 150, 0.5), Region(-20, 31, 97, 83, 1.0), Region(100, 90, 120, 90, 0.5)):
        ours, theirs = (mask_of(annotations, "a", slide, region) for annotations in (seg, tiff))
        np.testing.assert_array_equal(ours, theirs)
        assert ours.any()
    if reduced == 1:
        np.testing.assert_array_equal(mask_of(seg, "a", slide, WHOLE), VALUES)
        np.testing.assert_array_equal(mask_of(seg, "a", slide, Region(0, 0, 95, 75, 1.0)), VALUES[1::2, 1::2])


def test_each_file_numbers_its_segments_itself(tmp_path):
    write_segmentation(tmp_path / "a.dcm", VALUES, {1: "tumour", 2: "Ignore*", 3: "stroma"})
    write_segmentation(tmp_path / "b_mask.dcm", VALUES % 3, {1: "stroma", 2: "DCIS", 3: "nowhere drawn"})
    annotations = annotations_in(tmp_path, "a", "b", class_map=["DCIS=tumour"])
    assert annotations.classes == ("background", "stroma", "tumour")
    slide = blank_slide(190, 150)
    np.testing.assert_array_equal(mask_of(annotations, "a", slide, WHOLE), np.array([0, 2, 255, 1])[VALUES])
    np.testing.assert_array_equal(mask_of(annotations, "b", slide, WHOLE), VALUES % 3)


@pytest.mark.parametrize("apart", [False, True], ids=["in the slide's folder", "--annotations"])
def test_a_segmentation_of_no_slides_name_is_of_the_series_it_was_made_of(case7, apart):
    folder = case7.parents[1] / "annotations" if apart else None
    if apart:
        folder.mkdir()
        (case7 / "1.2.826.99.dcm").rename(folder / "9.dcm")
    (spec,) = find_slides(case7.parent)
    assert spec.slide_id == "case7"
    annotations = find_labels(case7.parent, (spec,), annotations=folder)
    with spec.open() as slide:
        assert [level.width for level in slide.levels] == [190, 95]
        np.testing.assert_array_equal(slide.read(Region(0, 0, 190, 150, slide.mpp)), PIXELS)
        np.testing.assert_array_equal(mask_of(annotations, "case7", slide, WHOLE), VALUES)


def test_a_segmentation_beside_a_slide_of_its_name_is_no_slide(tmp_path):
    Image.fromarray(np.full((150, 190, 3), 200, np.uint8)).save(tmp_path / "a.png")
    write_segmentation(tmp_path / "a.dcm", VALUES, NAMES)
    (spec,) = find_slides(tmp_path, mpp=0.5)
    assert spec.path.name == "a.png"
    with spec.open() as slide:
        np.testing.assert_array_equal(mask_of(find_labels(tmp_path, (spec,)), "a", slide, WHOLE), VALUES)


def shifted(dataset):
    dataset.TotalPixelMatrixOriginSequence[0].XOffsetInSlideCoordinateSystem -= 0.001


def on_another_glass(dataset):
    dataset.FrameOfReferenceUID = "1.2.3.4"


def turned(dataset):
    dataset.ImageOrientationSlide = [0.0, 1.0, 0.0, 1.0, 0.0, 0.0]


def of_half_the_size(dataset):
    dataset.SharedFunctionalGroupsSequence[0].PixelMeasuresSequence[0].PixelSpacing = [0.00025, 0.00025]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (shifted, r"must lie on the glass .* TotalPixelMatrixOrigin is \(19\.999, 40\.0\) mm, the slide's \(20\.0, 40"),
        (turned, r"must lie on the glass .* ImageOrientationSlide is \(0\.0, 1\.0, .*the slide's \(0\.0, -1\.0"),
        (on_another_glass, r"must lie on the glass .* FrameOfReferenceUID is 1\.2\.3\.4, the slide's .*as a mask TIFF"),
        (of_half_the_size, r"as large as its slide; 190 x 150 px of 0\.25 .* are 48 x 38 um, .* is 95 x 75 um"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_lies_elsewhere_is_refused_by_name(case7, change, reason):
    path = case7 / "1.2.826.99.dcm"
    dataset = pydicom.dcmread(path)
    change(dataset)
    dataset.save_as(path)
    (spec,) = find_slides(case7.parent)
    annotations = find_labels(case7.parent, (spec,))
    with spec.open() as slide, pytest.raises(SlideError, match=reason):
        mask_of(annotations, "case7", slide, Region(0, 0, 5, 5, 0.5))


def test_bounds_or_level_0_are_told_apart_by_size_and_areas_have_the_names(tmp_path):
    path = write_segmentation(tmp_path / "a.dcm", VALUES, NAMES)
    slide = blank_slide(380, 300, bounds=Bounds(100, 50, 190, 150))  # the proportions are those of both
    mask = mask_of(annotations_in(tmp_path, "a"), "a", slide, Region(100, 50, 190, 150, 0.5))
    np.testing.assert_array_equal(mask, VALUES)
    assert set(read_areas(path, blank_slide(190, 150)).classes) == set(NAMES.values())
