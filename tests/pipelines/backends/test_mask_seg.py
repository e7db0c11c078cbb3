"""DICOM Segmentations, written with highdicom, against the arrays they were made of; and what is refused."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pydicom
import pytest
from pydicom.dataset import Dataset
from pydicom.encaps import encapsulate

from pipelines.backends.mask import open_mask
from pipelines.backends.mask_seg import SegMask
from pipelines.slides.slide import SlideError
from tests.helpers.segmentation_file import write_segmentation
from tests.pipelines.backends.test_mask import check, sampled

VALUES = (np.add.outer(np.arange(173) // 23, np.arange(211) // 31) % 4).astype(np.uint8)
VALUES[:96, 40:170] = 0
"""Has frames without any segment, which TILED_SPARSE leaves out."""
NAMES = {1: "stroma", 2: "tumour", 3: "fat"}
IMPLICIT = "1.2.840.10008.1.2"
RLE, JPEG_LS = "1.2.840.10008.1.2.5", "1.2.840.10008.1.2.4.80"


def edited(path: Path, change: Callable[[Dataset], None]) -> Path:
    dataset = pydicom.dcmread(path)
    change(dataset)
    dataset.save_as(path)
    return path


@pytest.mark.parametrize(
    ("kind", "organization", "tile", "syntax"),
    [
        ("BINARY", "TILED_FULL", (64, 64), None),
        ("BINARY", "TILED_SPARSE", (32, 48), None),
        ("BINARY", "TILED_FULL", (31, 29), None),  # 899 bits: frames begin within a byte
        ("BINARY", "TILED_SPARSE", (64, 64), IMPLICIT),  # as older highdicom writes
        ("LABELMAP", "TILED_FULL", (64, 64), None),
        ("LABELMAP", "TILED_SPARSE", (64, 64), None),
        ("LABELMAP", "TILED_FULL", (64, 64), RLE),
        ("LABELMAP", "TILED_SPARSE", (64, 64), JPEG_LS),
    ],
)
def test_pixels_are_those_that_were_written(
    tmp_path: Path, kind: str, organization: str, tile: tuple[int, int], syntax: str | None
) -> None:
    compressed = {} if syntax is None else {"syntax": syntax}
    path = write_segmentation(tmp_path / "m.dcm", VALUES, NAMES, kind, organization, tile=tile, **compressed)
    mask = open_mask(path)
    assert isinstance(mask, SegMask)
    tiles = -(-VALUES.shape[0] // tile[0]) * -(-VALUES.shape[1] // tile[1]) * (3 if kind == "BINARY" else 1)
    assert (len(mask.header.x) < tiles) is (organization == "TILED_SPARSE")
    check(mask, VALUES)
    assert mask.names == NAMES
    assert mask.header.mpp == (0.5, 0.5)


def test_labels_of_16_bits_and_of_jpeg_2000(tmp_path: Path) -> None:
    import imagecodecs

    path = write_segmentation(tmp_path / "m.dcm", VALUES, NAMES, "LABELMAP")
    frames = np.frombuffer(pydicom.dcmread(path).PixelData, np.uint8)[: 3 * 4 * 64 * 64].reshape(-1, 64, 64)

    def widen(dataset: Dataset) -> None:
        dataset.BitsAllocated = dataset.BitsStored = 16
        dataset.PixelData = frames.astype("<u2").tobytes()

    check(open_mask(edited(path, widen)), VALUES)

    def compress(dataset: Dataset) -> None:
        dataset.BitsAllocated = dataset.BitsStored = 8
        dataset.file_meta.TransferSyntaxUID = "1.2.840.10008.1.2.4.90"
        dataset.PixelData = encapsulate(
            [imagecodecs.jpeg2k_encode(f, reversible=True, codecformat="j2k") for f in frames]
        )
        dataset["PixelData"].VR, dataset["PixelData"].is_undefined_length = "OB", True

    check(open_mask(edited(path, compress)), VALUES)


def test_the_higher_number_counts_where_segments_overlap(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    planes = np.zeros((40, 50, 2), np.uint8)
    planes[5:30, 5:30, 1] = 1
    planes[10:40, 10:40, 0] = 1
    mask = open_mask(
        write_segmentation(tmp_path / "m.dcm", planes, {1: "tissue", 2: "tumour"}, "BINARY", tile=(32, 32))
    )
    assert mask.values() == {0, 1, 2}
    assert "segments overlap at 400 px: the higher number counts" in caplog.text
    expected = np.where(planes[:, :, 1] == 1, 2, planes[:, :, 0])
    np.testing.assert_array_equal(sampled(mask, np.arange(50), np.arange(40)), expected)


def test_a_large_segmentation_is_read_where_it_is_asked_for(tmp_path: Path) -> None:
    """One frame of 65,000 px on a side and 1 bit: 528 MB, of which the file has holes and we read rows."""
    side = 65_000

    def enlarge(dataset: Dataset) -> None:
        dataset.Rows = dataset.Columns = dataset.TotalPixelMatrixRows = dataset.TotalPixelMatrixColumns = side

    path = write_segmentation(tmp_path / "m.dcm", np.ones((64, 64), np.uint8), {1: "a"}, "BINARY")
    edited(path, enlarge)
    data = path.read_bytes()
    at = data.index(b"\xe0\x7f\x10\x00") + 12
    size = side * side // 8
    with path.open("wb") as file:
        file.write(data[: at - 4] + size.to_bytes(4, "little"))
        file.truncate(at + size)
        file.seek(at + 40_000 * side // 8)
        file.write(b"\xff" * (side // 8))
    tracemalloc.start()
    pixels = sampled(open_mask(path), np.arange(30_000, 30_512), np.arange(39_800, 40_312))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert pixels[200].all()
    assert pixels.sum() == 512
    assert peak < 100 << 20


def no_matrix(dataset: Dataset) -> None:
    del dataset.TotalPixelMatrixRows


def a_part(dataset: Dataset) -> None:
    dataset.ConcatenationUID, dataset.InConcatenationTotalNumber = "1.2", 2


def two_planes(dataset: Dataset) -> None:
    dataset.TotalPixelMatrixFocalPlanes = 2


def one_frame_less(dataset: Dataset) -> None:
    dataset.NumberOfFrames -= 1


def no_positions(dataset: Dataset) -> None:
    dataset.DimensionOrganizationType = "TILED_SPARSE"


def number_of_two_bytes(dataset: Dataset) -> None:
    dataset.SegmentSequence[1].SegmentNumber = 300


def label_in_no_charset(dataset: Dataset) -> None:
    dataset.SegmentSequence[0].add_new(0x00620005, "LO", "Tumör".encode("latin-1"))
    dataset.SpecificCharacterSet = "ISO_IR 192"


def no_segments(dataset: Dataset) -> None:
    dataset.SegmentSequence = []


def deflated(dataset: Dataset) -> None:
    dataset.file_meta.TransferSyntaxUID = "1.2.840.10008.1.2.1.99"


def zero_spacing(dataset: Dataset) -> None:
    dataset.SharedFunctionalGroupsSequence[0].PixelMeasuresSequence[0].PixelSpacing = [0.0, 0.0]


def another_kind(dataset: Dataset) -> None:
    dataset.SegmentationType = "SURFACE"


def a_slide(dataset: Dataset) -> None:
    dataset.file_meta.MediaStorageSOPClassUID = "1.2.840.10008.5.1.4.1.1.77.1.6"
    dataset.SOPClassUID = dataset.file_meta.MediaStorageSOPClassUID


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (no_matrix, r"does not say how large its TotalPixelMatrix is.*write it as tiles"),
        (a_part, "is one of 2 files of a concatenation; write it as one file"),
        (two_planes, "has 2 focal planes"),
        (one_frame_less, r"is TILED_FULL with 35 frames; 3 x 4 x 3 .* would be 36"),
        (no_positions, "has 36 frames and says of 0 where they lie"),
        (number_of_two_bytes, "has a segment 300; numbers must be 1 to 255"),
        (label_in_no_charset, "has a label for segment 1 that is not in its character set, ISO_IR 192"),
        (no_segments, "has no segments"),
        (deflated, r"transfer syntax 1\.2\.840\.10008\.1\.2\.1\.99, deflated or big endian: write it as Explicit VR"),
        (zero_spacing, "PixelSpacing must be two lengths in mm"),
        (another_kind, "has SegmentationType 'SURFACE'; read are BINARY and LABELMAP"),
        (a_slide, "must be a DICOM Segmentation; it is another file"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_would_be_misread_is_refused_by_name(
    tmp_path: Path, whole: bytes, change: Callable[[Dataset], None], reason: str
) -> None:
    path = tmp_path / "m.dcm"
    path.write_bytes(whole)
    with pytest.raises(SlideError, match=rf"mask .*m\.dcm .*{reason}"):
        open_mask(edited(path, change))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return write_segmentation(tmp_path_factory.mktemp("seg") / "m.dcm", VALUES, NAMES).read_bytes()


def test_fractions_numbers_without_a_segment_and_a_background_that_is_not_0(tmp_path: Path) -> None:
    path = write_segmentation(tmp_path / "m.dcm", (VALUES > 0).astype(np.float32), {1: "a"}, "FRACTIONAL")
    with pytest.raises(SlideError, match="is FRACTIONAL, probabilities that are no classes; write it as BINARY"):
        open_mask(path)
    path = write_segmentation(tmp_path / "m.dcm", VALUES, NAMES, "LABELMAP")

    def drop_a_segment(dataset: Dataset) -> None:
        del dataset.SegmentSequence[-1]

    with pytest.raises(SlideError, match=r"has pixels of segment 3; its segments are \[1, 2\]"):
        open_mask(edited(path, drop_a_segment)).values()

    def pad_with_9(dataset: Dataset) -> None:
        dataset.PixelPaddingValue = 9

    with pytest.raises(SlideError, match="has the background 9; the background must be 0"):
        open_mask(edited(path, pad_with_9))


@pytest.mark.parametrize("kept", [0.02, 0.2, 0.6, 0.999])
def test_a_file_cut_short_is_named(tmp_path: Path, whole: bytes, kept: float) -> None:
    path = tmp_path / "m.dcm"
    path.write_bytes(whole[: int(len(whole) * kept)])
    with pytest.raises(SlideError, match=r"m\.dcm (is cut short|must be a DICOM Segmentation)"):
        open_mask(path)
