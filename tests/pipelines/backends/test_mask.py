"""Masks, in every way to store one, against the array that was stored; DICOM Segmentations are written by highdicom."""

import os
import struct
import tracemalloc
import zlib

import imagecodecs
import numpy as np
import pydicom
import pytest
import tifffile
from PIL import Image
from pydicom.encaps import encapsulate

from pipelines.backends.mask import ArrayMask, TiffMask, open_mask
from pipelines.backends.mask_seg import SegMask
from pipelines.slides.slide import SlideError
from tests.helpers.dicom_file import setting
from tests.helpers.segmentation_file import write_segmentation

VALUES = (np.add.outer(np.arange(700) // 90, np.arange(530) // 70) % 4).astype(np.uint8)
TILED = {"tile": (128, 128), "compression": "deflate"}
TIFFS = {
    "tiled": {"tile": (128, 256), "compression": "deflate"},
    "tiled lzw predictor": {"tile": (128, 128), "compression": "lzw", "predictor": 2},
    "tiled uncompressed": {"tile": (64, 64)},
    "strips": {"rowsperstrip": 50, "compression": "deflate"},
    "one strip": {},
    "palette": TILED | {"photometric": "palette", "colormap": np.zeros((3, 256), np.uint16)},
    "big-endian": TILED | {"byteorder": ">"},
    "bigtiff": TILED | {"bigtiff": True},
}


def sampled(mask, columns, rows):
    out = np.full((len(rows), len(columns)), 99, np.uint8)
    mask.sample(columns, rows, out)
    return out


def check(mask, values):
    height, width = values.shape
    assert (mask.height, mask.width) == values.shape
    assert mask.values() == set(np.unique(values).tolist())
    for first, step, n in ((0, 1, 530), (-40, 1, 700), (129, 1, 3), (-9, 3.7, 300), (100, 0.24, 90), (900, 1, 5)):
        columns = np.floor(first + np.arange(n) * step).astype(np.int64)
        rows = np.floor(first + 11 + np.arange(n // 2 + 1) * step).astype(np.int64)
        picked = values[np.clip(rows, 0, height - 1)][:, np.clip(columns, 0, width - 1)]
        here = ((rows >= 0) & (rows < height))[:, None] & ((columns >= 0) & (columns < width))[None, :]
        np.testing.assert_array_equal(sampled(mask, columns, rows), np.where(here, picked, 0))


@pytest.mark.parametrize(
    ("kind", "dtype"), [(k, d) for k in TIFFS for d in (np.uint8, np.uint16) if (k, d) != ("palette", np.uint16)]
)
def test_tiff(tmp_path, kind, dtype):
    tifffile.imwrite(tmp_path / "m.tif", VALUES.astype(dtype), **TIFFS[kind])
    check(open_mask(tmp_path / "m.tif"), VALUES)
    if kind != "one strip":
        check(TiffMask(tmp_path / "m.tif"), VALUES)


@pytest.mark.parametrize("photometric", ["minisblack", "miniswhite"])
@pytest.mark.parametrize("tile", [None, (128, 128)])
def test_bits(tmp_path, caplog, tile, photometric):
    values = VALUES > 1
    tifffile.imwrite(tmp_path / "m.tif", values, tile=tile, compression="deflate", photometric=photometric)
    check(open_mask(tmp_path / "m.tif"), values.astype(np.uint8))
    assert caplog.text.count("class 1 is where the bits of this mask are 1") == (photometric == "miniswhite")


def test_only_the_first_level_of_a_pyramid_counts(tmp_path):
    with tifffile.TiffWriter(tmp_path / "m.tif") as file:
        file.write(VALUES, subifds=1, **TILED)
        file.write(VALUES[::2, ::2] + 100, subfiletype=1, **TILED)
    check(open_mask(tmp_path / "m.tif"), VALUES)


def write_pieces(path, pieces, side, **options):
    tifffile.imwrite(path, pieces, shape=(side, side), dtype=np.uint8, compression="deflate", **options)


def test_pieces_that_the_file_leaves_out_are_background(tmp_path):
    piece = zlib.compress(np.full((128, 128), 3, np.uint8).tobytes())
    write_pieces(tmp_path / "m.tif", iter([b"", piece, piece, b""]), 256, tile=(128, 128))
    check(open_mask(tmp_path / "m.tif"), np.kron([[0, 3], [3, 0]], np.ones((128, 128))).astype(np.uint8))


@pytest.mark.parametrize("level", [0, 9])
@pytest.mark.parametrize("pixels", [VALUES, np.repeat(VALUES[:, :, None], 3, axis=2)], ids=["one channel", "grey rgb"])
def test_png(tmp_path, level, pixels):
    (tmp_path / "m.png").write_bytes(imagecodecs.png_encode(pixels, level=level))
    check(open_mask(tmp_path / "m.png"), VALUES)


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
@pytest.mark.parametrize("colour_type", [0, 3], ids=["grey", "palette"])
def test_png_palette_and_few_bits_give_stored_values(tmp_path, bits, colour_type):
    values = (VALUES[:, :512] * 67 + 5) & ((1 << bits) - 1)
    palette = [colour for i in range(1 << bits) for colour in (i * 40 % 256, 255 - i, 7)]
    packed = np.packbits(np.unpackbits(values[:, :, None], axis=2)[:, :, 8 - bits :].reshape(len(values), -1), axis=1)
    chunks = [b"IHDR" + np.array([512, 700], ">u4").tobytes() + bytes([bits, colour_type, 0, 0, 0])]
    chunks += [b"PLTE" + bytes(palette)] if colour_type == 3 else []
    chunks += [b"IDAT" + zlib.compress(np.pad(packed, ((0, 0), (1, 0))).tobytes()), b"IEND"]
    framed = ((len(c) - 4).to_bytes(4, "big") + c + zlib.crc32(c).to_bytes(4, "big") for c in chunks)
    (tmp_path / "m.png").write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(framed))
    check(open_mask(tmp_path / "m.png"), values)


def test_a_png_whose_palette_has_a_colour_twice(tmp_path):
    picture = Image.fromarray(VALUES)
    picture.putpalette([0, 0, 0, 9, 9, 9] * 128)
    picture.save(tmp_path / "m.png")
    check(open_mask(tmp_path / "m.png"), VALUES)


def test_a_large_mask_is_read_piece_by_piece(tmp_path):
    side, tile = 100_000, 512
    across = -(-side // tile)
    background = zlib.compress(np.zeros((tile, tile), np.uint8).tobytes())
    drawn = zlib.compress((np.arange(tile * tile) % tile // 300).astype(np.uint8).tobytes())
    pieces = (drawn if i == 100 * across + 150 else background for i in range(across * across))
    write_pieces(tmp_path / "m.tif", pieces, side, tile=(tile, tile))
    tracemalloc.start()
    mask = open_mask(tmp_path / "m.tif")
    assert mask.values() == {0, 1}
    got = sampled(mask, np.arange(150 * tile - 700, 150 * tile + 1348), np.arange(100 * tile - 5, 100 * tile + 2043))
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert np.argwhere(got)[[0, -1]].tolist() == [[5, 1000], [5 + 511, 1211]]
    assert peak_bytes < 40 << 20


def test_files_are_closed_and_uncompressed_ones_not_loaded(tmp_path):
    tifffile.imwrite(tmp_path / "m.tif", VALUES, **TIFFS["tiled"])
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        sampled(open_mask(tmp_path / "m.tif"), np.arange(5), np.arange(5))
    assert len(os.listdir("/proc/self/fd")) == before
    tifffile.imwrite(tmp_path / "m.tif", VALUES)
    mask = open_mask(tmp_path / "m.tif")
    assert isinstance(mask, ArrayMask)
    assert mask.nbytes == 0


def tiff_bytes(tmp_path, pixels=VALUES, **options):
    tifffile.imwrite(tmp_path / "whole.tif", pixels, **options)
    return (tmp_path / "whole.tif").read_bytes()


def rotten(data, tmp_path):
    with tifffile.TiffFile(tmp_path / "whole.tif") as file:
        at = file.pages.first.dataoffsets[4]
    return data[:at] + b"\xff" * 30 + data[at + 30 :]


def with_tag(data, new):
    at = data.index(struct.pack("<HHI", 258, 3, 1))
    return data[:at] + struct.pack("<HHI", *new) + data[at + 8 :]


COLOUR = np.stack([VALUES, VALUES + 1, VALUES], axis=2)
MISREAD = r"cannot be read as TIFF: it is damaged: .*(258|out of order)"


@pytest.mark.parametrize(
    ("name", "made", "words"),
    [
        ("rot.tif", lambda f: rotten(tiff_bytes(f, **TIFFS["tiled"]), f), r"is damaged: piece 4"),
        *(
            (f"cut{n}.tif", lambda f, n=n: tiff_bytes(f, **TIFFS["tiled"])[:n], "(cannot be read|is cut off|must have)")
            for n in (0, 3, 9, 200)
        ),
        ("cut.png", lambda f: imagecodecs.png_encode(VALUES)[:100], "is damaged"),
        ("gone.png", None, "cannot be read"),
        ("gone.tif", None, "cannot be read"),
        ("rgb.tif", lambda f: tiff_bytes(f, COLOUR, photometric="rgb", **TILED), "must have one channel"),
        ("rgb.png", lambda f: imagecodecs.png_encode(COLOUR), "must have one channel"),
        ("float.tif", lambda f: tiff_bytes(f, VALUES.astype(np.float32), tile=(128, 128)), "whole numbers"),
        ("many.tif", lambda f: tiff_bytes(f, VALUES.astype(np.uint16) + 500, **TILED), "it holds 500"),
        # Without its BitsPerSample a mask of classes was read as one of 0 and 1.
        ("count.tif", lambda f: with_tag(tiff_bytes(f, **TILED), (258, 3, 0x7FFFFFFF)), MISREAD),
        ("order.tif", lambda f: with_tag(tiff_bytes(f, **TILED), (296, 3, 1)), MISREAD),
    ],
    ids=lambda value: value if isinstance(value, str) and "." in value and " " not in value else "",
)
def test_damaged_files_and_what_is_no_mask_are_named(tmp_path, name, made, words):
    if made:
        (tmp_path / name).write_bytes(made(tmp_path))
    with pytest.raises(SlideError, match=rf"{name} .*{words}"):
        sampled(open_mask(tmp_path / name), np.arange(530), np.arange(700))


def test_a_pipe_and_one_huge_compressed_strip_are_refused(tmp_path):
    os.mkfifo(tmp_path / "m.png")
    with pytest.raises(SlideError, match="must be a file"):
        open_mask(tmp_path / "m.png")
    side = 17_000
    strip = zlib.compress(np.zeros((side, side), np.uint8).tobytes(), 1)
    write_pieces(tmp_path / "m.tif", iter([strip]), side, rowsperstrip=side)
    with pytest.raises(SlideError, match="Save it as a tiled TIFF"):
        open_mask(tmp_path / "m.tif")


SEGMENTS = (np.add.outer(np.arange(173) // 23, np.arange(211) // 31) % 4).astype(np.uint8)
SEGMENTS[:96, 40:170] = 0
"""Has frames without any segment, which TILED_SPARSE leaves out."""
NAMES = {1: "stroma", 2: "tumour", 3: "fat"}
EXPLICIT, IMPLICIT = "1.2.840.10008.1.2.1", "1.2.840.10008.1.2"
RLE, JPEG_LS = "1.2.840.10008.1.2.5", "1.2.840.10008.1.2.4.80"


def edited(path, change):
    dataset = pydicom.dcmread(path)
    change(dataset)
    dataset.save_as(path)
    return path


@pytest.mark.parametrize(
    ("kind", "organization", "tile", "syntax"),
    [
        ("BINARY", "TILED_FULL", (64, 64), EXPLICIT),
        ("BINARY", "TILED_SPARSE", (32, 48), EXPLICIT),
        ("BINARY", "TILED_FULL", (31, 29), EXPLICIT),  # 899 bits: frames begin within a byte
        ("BINARY", "TILED_SPARSE", (64, 64), IMPLICIT),  # as older highdicom writes
        ("LABELMAP", "TILED_FULL", (64, 64), EXPLICIT),
        ("LABELMAP", "TILED_SPARSE", (64, 64), EXPLICIT),
        ("LABELMAP", "TILED_FULL", (64, 64), RLE),
        ("LABELMAP", "TILED_SPARSE", (64, 64), JPEG_LS),
    ],
)
def test_segmentation(tmp_path, kind, organization, tile, syntax):
    path = write_segmentation(tmp_path / "m.dcm", SEGMENTS, NAMES, kind, organization, tile=tile, syntax=syntax)
    mask = open_mask(path)
    assert isinstance(mask, SegMask)
    tiles = -(-SEGMENTS.shape[0] // tile[0]) * -(-SEGMENTS.shape[1] // tile[1]) * (3 if kind == "BINARY" else 1)
    assert (len(mask.header.x) < tiles) is (organization == "TILED_SPARSE")
    check(mask, SEGMENTS)
    assert mask.names == NAMES
    assert mask.header.mpp == (0.5, 0.5)


def test_segmentation_of_16_bits_and_of_jpeg_2000(tmp_path):
    path = write_segmentation(tmp_path / "m.dcm", SEGMENTS, NAMES, "LABELMAP")
    frames = np.frombuffer(pydicom.dcmread(path).PixelData, np.uint8)[: 3 * 4 * 64 * 64].reshape(-1, 64, 64)

    def widen(dataset):
        dataset.BitsAllocated = dataset.BitsStored = 16
        dataset.PixelData = frames.astype("<u2").tobytes()

    check(open_mask(edited(path, widen)), SEGMENTS)

    def compress(dataset):
        dataset.BitsAllocated = dataset.BitsStored = 8
        dataset.file_meta.TransferSyntaxUID = "1.2.840.10008.1.2.4.90"
        packed = [imagecodecs.jpeg2k_encode(f, reversible=True, codecformat="j2k") for f in frames]
        dataset.PixelData = encapsulate(packed)
        dataset["PixelData"].VR, dataset["PixelData"].is_undefined_length = "OB", True

    check(open_mask(edited(path, compress)), SEGMENTS)


def test_the_higher_number_counts_where_segments_overlap(tmp_path, caplog):
    planes = np.zeros((40, 50, 2), np.uint8)
    planes[5:30, 5:30, 1] = planes[10:40, 10:40, 0] = 1
    names = {1: "tissue", 2: "tumour"}
    mask = open_mask(write_segmentation(tmp_path / "m.dcm", planes, names, "BINARY", tile=(32, 32)))
    assert mask.values() == {0, 1, 2}
    assert "segments overlap at 400 px: the higher number counts" in caplog.text
    expected = np.where(planes[:, :, 1] == 1, 2, planes[:, :, 0])
    np.testing.assert_array_equal(sampled(mask, np.arange(50), np.arange(40)), expected)


def test_a_large_segmentation_is_read_where_it_is_asked_for(tmp_path):
    """One frame of 65,000 px on a side and 1 bit: 528 MB, of which the file has holes and we read rows."""
    side = 65_000
    path = write_segmentation(tmp_path / "m.dcm", np.ones((64, 64), np.uint8), {1: "a"}, "BINARY")
    edited(path, setting(Rows=side, Columns=side, TotalPixelMatrixRows=side, TotalPixelMatrixColumns=side))
    data = path.read_bytes()
    at, size = data.index(b"\xe0\x7f\x10\x00") + 12, side * side // 8
    with path.open("wb") as file:
        file.write(data[: at - 4] + size.to_bytes(4, "little"))
        file.truncate(at + size)
        file.seek(at + 40_000 * side // 8)
        file.write(b"\xff" * (side // 8))
    tracemalloc.start()
    pixels = sampled(open_mask(path), np.arange(30_000, 30_512), np.arange(39_800, 40_312))
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert pixels[200].all()
    assert pixels.sum() == 512
    assert peak_bytes < 100 << 20


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Files of each kind, by kind."""
    folder = tmp_path_factory.mktemp("seg")
    for kind in ("BINARY", "LABELMAP"):
        write_segmentation(folder / f"{kind}.dcm", SEGMENTS, NAMES, kind)
    write_segmentation(folder / "FRACTIONAL.dcm", (SEGMENTS > 0).astype(np.float32), {1: "a"}, "FRACTIONAL")
    return {path.stem: path.read_bytes() for path in folder.iterdir()}


def label_in_no_charset(dataset):
    dataset.SegmentSequence[0].add_new(0x00620005, "LO", "Tumör".encode("latin-1"))
    dataset.SpecificCharacterSet = "ISO_IR 192"


def zero_spacing(dataset):
    dataset.SharedFunctionalGroupsSequence[0].PixelMeasuresSequence[0].PixelSpacing = [0.0, 0.0]


def another_class(dataset):
    dataset.SOPClassUID = dataset.file_meta.MediaStorageSOPClassUID = "1.2.840.10008.5.1.4.1.1.77.1.6"


REFUSED = {
    "no matrix": (lambda d: d.pop("TotalPixelMatrixRows"), "TotalPixelMatrix is.*write it as tiles"),
    "one of two": (setting(ConcatenationUID="1.2", InConcatenationTotalNumber=2), "one of 2 files of a concatenation"),
    "two planes": (setting(TotalPixelMatrixFocalPlanes=2), "2 focal planes"),
    "a frame less": (setting(NumberOfFrames=35), r"TILED_FULL with 35 frames; 3 x 4 x 3 .* 36"),
    "no positions": (setting(DimensionOrganizationType="TILED_SPARSE"), "36 frames and says of 0 where they lie"),
    "number": (lambda d: setting(SegmentNumber=300)(d.SegmentSequence[1]), "segment 300; numbers must be 1 to 255"),
    "label": (label_in_no_charset, "label for segment 1 that is not in its character set, ISO_IR 192"),
    "no segments": (setting(SegmentSequence=[]), "has no segments"),
    "deflated": (lambda d: setting(TransferSyntaxUID="1.2.840.10008.1.2.1.99")(d.file_meta), "deflated or big endian"),
    "spacing": (zero_spacing, "PixelSpacing must be two lengths in mm"),
    "surface": (setting(SegmentationType="SURFACE"), "'SURFACE'; read are BINARY and LABELMAP"),
    "a slide": (another_class, "must be a DICOM Segmentation; it is another file"),
    "FRACTIONAL": (lambda d: None, "probabilities that are no classes; write it as BINARY"),
    "LABELMAP background": (setting(PixelPaddingValue=9), "background 9; the background must be 0"),
    "LABELMAP segment": (lambda d: d.SegmentSequence.pop(), r"pixels of segment 3; its segments are \[1, 2\]"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_segmentation_that_would_be_misread_is_refused_by_name(tmp_path, written, case):
    change, words = REFUSED[case]
    (tmp_path / "m.dcm").write_bytes(written[case.split()[0] if case.split()[0] in written else "BINARY"])
    with pytest.raises(SlideError, match=rf"m\.dcm .*{words}"):
        open_mask(edited(tmp_path / "m.dcm", change)).values()


@pytest.mark.parametrize("kept", [0.02, 0.2, 0.6, 0.999])
def test_a_segmentation_cut_short_is_named(tmp_path, written, kept):
    path, whole = tmp_path / "m.dcm", written["BINARY"]
    path.write_bytes(whole[: int(len(whole) * kept)])
    with pytest.raises(SlideError, match=r"m\.dcm (is cut short|must be a DICOM Segmentation)"):
        open_mask(path)
