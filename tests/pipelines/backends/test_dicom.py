"""DICOM series: one slide whatever the number of files, and what OpenSlide would misread is refused by name."""

import contextlib
import errno
import shutil

import numpy as np
import pydicom
import pytest
from pydicom.dataset import Dataset
from pydicom.encaps import encapsulate

from pipelines.backends import dicom_elements, dicom_head
from pipelines.backends.registry import open_slide
from pipelines.catalog.catalog import find_slides
from pipelines.slides.geometry import Region
from pipelines.slides.slide import SlideError
from tests.helpers.dicom_file import setting, write_dicom_slide

TILE = 32
PIXELS = np.random.default_rng(0).integers(0, 256, (150, 190, 3), np.uint8)


@pytest.fixture(scope="module")
def series(tmp_path_factory):
    """A slide of three levels, with a small label image beside them."""
    folder = tmp_path_factory.mktemp("dicom") / "case7"
    paths = write_dicom_slide(folder, [PIXELS[::step, ::step] for step in (1, 2, 4)], encoding="raw", tile=TILE)
    label = pydicom.dcmread(paths[-1])
    label.ImageType = ["ORIGINAL", "PRIMARY", "LABEL", "NONE"]
    label.SOPInstanceUID = label.file_meta.MediaStorageSOPInstanceUID = "1.2.3.4"
    label.save_as(folder / "label.dcm")
    return folder


@pytest.fixture
def copy(series, tmp_path):
    return shutil.copytree(series, tmp_path / "copy")


def found_in(folder):
    (spec,) = find_slides(folder)
    return spec.path


def edited(folder, change):
    """The file that the catalog opens, after ``change`` to each file of ``folder``."""
    for path in folder.iterdir():
        dataset = pydicom.dcmread(path)
        change(dataset)
        dataset.save_as(path)
    return found_in(folder)


def put_frames_in_any_order(dataset):
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


def test_the_files_of_a_series_are_the_levels_of_one_slide(series):
    (spec,) = find_slides(series)
    assert spec.slide_id == "case7"
    for path in sorted(series.glob("[0-9]*.dcm")):
        with open_slide(path) as slide:
            assert [(level.width, level.height) for level in slide.levels] == [(190, 150), (95, 75), (48, 38)]
            assert slide.mpp == 0.5
            for level in slide.levels:
                got = slide.read(Region(0, 0, level.width, level.height, level.mpp))
                np.testing.assert_array_equal(got, PIXELS[:: 2**level.index, :: 2**level.index])


def test_two_series_in_a_folder_are_two_slides(copy):
    write_dicom_slide(copy, [np.full((64, 64, 3), 7, np.uint8)], encoding="raw", tile=TILE)
    sizes = set()
    for spec in find_slides(copy):
        with spec.open() as slide:
            sizes.add((len(slide.levels), slide.levels[0].width))
    assert sizes == {(3, 190), (1, 64)}


def test_two_pyramids_of_a_series_are_not_mixed(copy):
    uid = pydicom.dcmread(found_in(copy)).SeriesInstanceUID
    (path,) = write_dicom_slide(copy, [np.full((32, 64, 3), 7, np.uint8)], encoding="raw", tile=TILE)
    piece = pydicom.dcmread(path)
    piece.SeriesInstanceUID = uid
    piece.save_as(path)
    with pytest.raises(SlideError, match=r"several slides, .* 64 x 32, .* with 0 PyramidUIDs .*folder of its own"):
        open_slide(path)
    path.unlink()

    path = edited(copy, lambda dataset: setting(PyramidUID=f"1.2.{dataset.TotalPixelMatrixColumns == 95:d}")(dataset))
    with pytest.raises(SlideError, match=r"several slides, .* with 2 PyramidUIDs"):
        open_slide(path)
    with open_slide(edited(copy, setting(PyramidUID="1.2.3"))) as slide:
        assert len(slide.levels) == 3


def test_jpeg_2000_without_the_colour_transform_that_its_header_names_is_refused(tmp_path):
    (path,) = write_dicom_slide(tmp_path, [PIXELS], encoding="jpeg2000-lossless")
    with open_slide(path) as slide:
        np.testing.assert_array_equal(slide.read(Region(0, 0, 190, 150, slide.mpp)), PIXELS)
    data = bytearray(path.read_bytes())
    transform = data.index(b"\xff\x52", data.index(b"\xff\x4f\xff\x51") + 42) + 8
    assert data[transform] == 1
    data[transform] = 0
    path.write_bytes(data)
    with pytest.raises(SlideError, match=r"YBR_RCT, and JPEG 2000 frames without that colour transform.*convert"):
        open_slide(path)


def test_frames_in_any_order_lie_where_they_say(copy):
    with open_slide(edited(copy, put_frames_in_any_order)) as slide:
        np.testing.assert_array_equal(slide.read(Region(0, 0, 190, 150, slide.mpp)), PIXELS)


def nested(depth, defined):
    """A private sequence in a sequence, ``depth`` times, of defined lengths or not."""
    head, item = b"\x09\0\x10\x10SQ\0\0", b"\xfe\xff\x00\xe0"
    lengths = [(20 * i + 8, 20 * i) if defined else (0xFFFFFFFF, 0xFFFFFFFF) for i in reversed(range(depth))]
    return b"".join(head + a.to_bytes(4, "little") + item + b.to_bytes(4, "little") for a, b in lengths)


def nest(path, depth, *, defined, source=None, before=b"\x20\0\x0d\0UI"):
    """Put nested sequences before a tag of ``source``, by default StudyInstanceUID, and write that to ``path``."""
    data = (source or path).read_bytes()
    at = data.index(before)
    path.write_bytes(data[:at] + nested(depth, defined) + data[at:])


@pytest.mark.parametrize("name", ["", "label.dcm", "another_file"])
@pytest.mark.parametrize("defined", [False, True])
def test_sequences_nested_too_deep_never_reach_libdicom(copy, defined, name):
    path = found_in(copy)
    target = copy / (name or path.name)
    nest(target, 100_000, defined=defined, source=target if target.exists() else path)
    with pytest.raises(SlideError, match="nested more than 64 deep"):
        open_slide(path)


def test_nested_sequences_of_a_usual_depth_are_read_and_deep_ones_among_frames_are_found(copy):
    nest(found_in(copy), 10, defined=True)
    with open_slide(found_in(copy)) as slide:
        assert len(slide.levels) == 3
    path = edited(copy, put_frames_in_any_order)
    nest(path, 100_000, defined=False, before=b"\x48\0\x1a\x02SQ")  # PlanePositionSlideSequence of the first frame
    with pytest.raises(SlideError, match="nested more than 64 deep"):
        open_slide(path)


def set_jpeg_ls(dataset):
    dataset.file_meta.TransferSyntaxUID = "1.2.840.10008.1.2.4.80"
    dataset.PixelData = encapsulate([b"no picture"])
    dataset["PixelData"].is_undefined_length = True


GREY_16 = setting(SamplesPerPixel=1, PhotometricInterpretation="MONOCHROME2", BitsAllocated=16, BitsStored=16)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (setting(DimensionOrganizationType="TILED_SPARSE"), r"\(TILED_SPARSE\) .*write it anew"),  # or a crash
        (GREY_16, r"1 sample\(s\) of 16 bits.*convert it to 8-bit RGB"),
        (setting(NumberOfOpticalPaths=2), "2 optical paths"),
        (setting(TotalPixelMatrixFocalPlanes=3), "3 focal planes"),
        (lambda dataset: dataset.pop("ImageType"), "no ImageType.*VOLUME"),
        (set_jpeg_ls, r"transfer syntax 1\.2\.840\.10008\.1\.2\.4\.80; read are"),
    ],
    ids=["sparse", "fluorescence", "two paths", "three planes", "no type", "JPEG-LS"],
)
def test_what_would_be_shown_in_part_or_end_the_process_is_refused(copy, change, words):
    with pytest.raises(SlideError, match=rf"\.dcm of its series has .*{words}"):
        open_slide(edited(copy, change))


def test_a_level_cut_short_is_not_left_out_without_a_word(copy):
    path = found_in(copy)
    middle = next(p for p in copy.iterdir() if pydicom.dcmread(p).TotalPixelMatrixColumns == 95)
    data = middle.read_bytes()
    middle.write_bytes(data[: data.index(b"\xe0\x7f\x10\x00") - 4])
    with pytest.raises(SlideError, match=rf"{middle.name} of its series ends before its pixels: cut short"):
        open_slide(path)


@pytest.mark.parametrize("name", ["notes.txt", "other.dcm"])
def test_a_file_of_the_folder_that_cannot_be_read(copy, monkeypatch, name):
    path = found_in(copy)
    (copy / name).write_bytes(b"closed")

    def is_dicom(file):
        if file.name == name:
            raise PermissionError(errno.EACCES, "Permission denied", str(file))
        return dicom_elements.is_dicom(file)

    monkeypatch.setattr(dicom_head, "is_dicom", is_dicom)
    refused = pytest.raises(SlideError, match=r"other\.dcm in its folder cannot be read: Permission denied; check")
    with refused if name == "other.dcm" else contextlib.nullcontext(), open_slide(path) as slide:
        assert len(slide.levels) == 3
