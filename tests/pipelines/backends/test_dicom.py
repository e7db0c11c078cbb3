"""DICOM series: one slide whatever the number of files, and what OpenSlide would misread is refused by name."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pydicom
import pytest
from pydicom.dataset import Dataset
from pydicom.encaps import encapsulate

from pipelines.backends.registry import open_slide
from pipelines.catalog.catalog import find_slides
from pipelines.slides.geometry import Region
from pipelines.slides.slide import SlideError
from tests.helpers.dicom_file import write_dicom_slide

TILE = 32


@pytest.fixture(scope="module")
def series(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A slide of three levels, with a small label image and another slide's file beside them."""
    folder = tmp_path_factory.mktemp("dicom") / "case7"
    pixels = np.random.default_rng(0).integers(0, 256, (150, 190, 3), np.uint8)
    paths = write_dicom_slide(folder, [pixels, pixels[::2, ::2], pixels[::4, ::4]], encoding="raw", tile=TILE)
    label = pydicom.dcmread(paths[-1])
    label.ImageType = ["ORIGINAL", "PRIMARY", "LABEL", "NONE"]
    label.SOPInstanceUID = label.file_meta.MediaStorageSOPInstanceUID = "1.2.3.4"
    label.save_as(folder / "label.dcm")
    return folder


def edited(series: Path, folder: Path, change: Callable[[Dataset], None]) -> Path:
    """A copy of ``series`` with ``change`` made to each file; the file that the catalog opens."""
    shutil.copytree(series, folder)
    for path in folder.iterdir():
        dataset = pydicom.dcmread(path)
        change(dataset)
        dataset.save_as(path)
    (spec,) = find_slides(folder)
    return spec.path


def put_frames_in_any_order(dataset: Dataset) -> None:
    """TILED_SPARSE: the frames turned round, each with its place."""
    columns = -(-dataset.TotalPixelMatrixColumns // TILE)
    frames = []
    for i in range(dataset.NumberOfFrames):
        place, frame = Dataset(), Dataset()
        place.ColumnPositionInTotalImagePixelMatrix = i % columns * TILE + 1
        place.RowPositionInTotalImagePixelMatrix = i // columns * TILE + 1
        frame.PlanePositionSlideSequence = [place]
        frames.append(frame)
    dataset.PerFrameFunctionalGroupsSequence = frames[::-1]
    size = TILE * TILE * 3
    pixels = dataset.PixelData
    dataset.PixelData = b"".join(pixels[i : i + size] for i in reversed(range(0, len(pixels), size)))
    dataset["PixelData"].VR = "OB"
    dataset.DimensionOrganizationType = "TILED_SPARSE"


def test_the_files_of_a_series_are_the_levels_of_one_slide(series: Path) -> None:
    (spec,) = find_slides(series)
    assert spec.slide_id == "case7"
    expected = np.random.default_rng(0).integers(0, 256, (150, 190, 3), np.uint8)
    for path in sorted(series.glob("[0-9]*.dcm")):
        with open_slide(path) as slide:
            assert [(level.width, level.height) for level in slide.levels] == [(190, 150), (95, 75), (48, 38)]
            assert slide.mpp == 0.5
            for level in slide.levels:
                got = slide.read(Region(0, 0, level.width, level.height, level.mpp))
                np.testing.assert_array_equal(got, expected[:: 2**level.index, :: 2**level.index])


def test_two_series_in_a_folder_are_two_slides(series: Path, tmp_path: Path) -> None:
    shutil.copytree(series, tmp_path / "both")
    write_dicom_slide(tmp_path / "both", [np.full((64, 64, 3), 7, np.uint8)], encoding="raw", tile=TILE)
    specs = find_slides(tmp_path)
    assert len(specs) == 2
    sizes = set()
    for spec in specs:
        with spec.open() as slide:
            sizes.add((len(slide.levels), slide.levels[0].width))
    assert sizes == {(3, 190), (1, 64)}


def test_frames_in_any_order_lie_where_they_say(series: Path, tmp_path: Path) -> None:
    with open_slide(edited(series, tmp_path / "sparse", put_frames_in_any_order)) as slide:
        got = slide.read(Region(0, 0, 190, 150, slide.mpp))
    np.testing.assert_array_equal(got, np.random.default_rng(0).integers(0, 256, (150, 190, 3), np.uint8))


def nested(depth: int, defined: bool) -> bytes:
    """A private sequence in a sequence, ``depth`` times."""
    if not defined:
        return (b"\x09\0\x10\x10SQ\0\0" + b"\xff" * 4 + b"\xfe\xff\x00\xe0" + b"\xff" * 4) * depth
    parts = []
    for i in range(depth):
        inner = 20 * (depth - 1 - i)
        lengths = (inner + 8).to_bytes(4, "little"), inner.to_bytes(4, "little")
        parts.append(b"\x09\0\x10\x10SQ\0\0" + lengths[0] + b"\xfe\xff\x00\xe0" + lengths[1])
    return b"".join(parts)


def with_nested(series: Path, folder: Path, depth: int, defined: bool, name: str) -> Path:
    """A copy of ``series`` where a sequence is nested in the file ``name``; the slide."""
    shutil.copytree(series, folder)
    (spec,) = find_slides(folder)
    path = folder / (name or spec.path.name)
    data = (path if path.exists() else spec.path).read_bytes()
    at = data.index(b"\x20\0\x0d\0UI")  # StudyInstanceUID
    path.write_bytes(data[:at] + nested(depth, defined) + data[at:])
    return spec.path


@pytest.mark.parametrize("name", ["", "label.dcm", "another_file"])
@pytest.mark.parametrize("defined", [False, True])
def test_sequences_nested_too_deep_never_reach_libdicom(series: Path, tmp_path: Path, defined: bool, name: str) -> None:
    path = with_nested(series, tmp_path / "deep", 100_000, defined, name)
    with pytest.raises(SlideError, match="nested more than 64 deep"):
        open_slide(path)


def test_sequences_of_a_usual_depth_are_read(series: Path, tmp_path: Path) -> None:
    with open_slide(with_nested(series, tmp_path / "usual", 10, True, "")) as slide:
        assert len(slide.levels) == 3


def test_a_deep_sequence_among_the_places_of_frames_is_found(series: Path, tmp_path: Path) -> None:
    path = edited(series, tmp_path / "sparse", put_frames_in_any_order)
    data = path.read_bytes()
    at = data.index(b"\x48\0\x1a\x02SQ")  # PlanePositionSlideSequence of the first frame
    path.write_bytes(data[:at] + nested(100_000, False) + data[at:])
    with pytest.raises(SlideError, match="nested more than 64 deep"):
        open_slide(path)


def remove_image_type(dataset: Dataset) -> None:
    del dataset.ImageType


def set_sparse(dataset: Dataset) -> None:
    dataset.DimensionOrganizationType = "TILED_SPARSE"


def set_fluorescence(dataset: Dataset) -> None:
    dataset.SamplesPerPixel, dataset.PhotometricInterpretation = 1, "MONOCHROME2"
    dataset.BitsAllocated = dataset.BitsStored = 16


def set_two_paths(dataset: Dataset) -> None:
    dataset.NumberOfOpticalPaths = 2


def set_three_planes(dataset: Dataset) -> None:
    dataset.TotalPixelMatrixFocalPlanes = 3


def set_jpeg_ls(dataset: Dataset) -> None:
    dataset.file_meta.TransferSyntaxUID = "1.2.840.10008.1.2.4.80"
    dataset.PixelData = encapsulate([b"no picture"])
    dataset["PixelData"].is_undefined_length = True


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (set_sparse, r"no fixed order \(TILED_SPARSE\) and does not say where they lie.*write it anew"),  # or a crash
        (set_fluorescence, r"1 sample\(s\) of 16 bits.*convert it to 8-bit RGB"),
        (set_two_paths, "2 optical paths, of which one would be shown"),
        (set_three_planes, "3 focal planes, of which one would be shown"),
        (remove_image_type, "no ImageType.*VOLUME"),
        (set_jpeg_ls, r"transfer syntax 1\.2\.840\.10008\.1\.2\.4\.80; read are uncompressed, JPEG, JPEG 2000"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_would_be_shown_in_part_or_end_the_process_is_refused(
    series: Path, tmp_path: Path, change: Callable[[Dataset], None], reason: str
) -> None:
    with pytest.raises(SlideError, match=rf"\.dcm of its series has .*{reason}"):
        open_slide(edited(series, tmp_path / "edited", change))


def test_a_level_cut_short_is_not_left_out_without_a_word(series: Path, tmp_path: Path) -> None:
    shutil.copytree(series, tmp_path / "cut")
    (spec,) = find_slides(tmp_path / "cut")
    middle = next(p for p in (tmp_path / "cut").iterdir() if pydicom.dcmread(p).TotalPixelMatrixColumns == 95)
    data = middle.read_bytes()
    middle.write_bytes(data[: data.index(b"\xe0\x7f\x10\x00") - 4])
    with pytest.raises(SlideError, match=rf"{middle.name} of its series ends before its pixels: cut short"):
        spec.open()
