"""Writes a whole slide as a DICOM series: one multi-frame file per level, as DICOM PS3.3 A.32.8 has it (TILED_FULL)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import imagecodecs
import numpy as np
import simplejpeg
from numpy.typing import NDArray
from pydicom.dataset import Dataset, FileDataset, FileMetaDataset
from pydicom.encaps import encapsulate
from pydicom.uid import JPEG2000, ExplicitVRLittleEndian, JPEG2000Lossless, JPEGBaseline8Bit, generate_uid

WHOLE_SLIDE_MICROSCOPY = "1.2.840.10008.5.1.4.1.1.77.1.6"
SYNTAXES = {
    "raw": (ExplicitVRLittleEndian, "RGB"),
    "jpeg": (JPEGBaseline8Bit, "YBR_FULL_422"),
    "jpeg2000": (JPEG2000, "YBR_ICT"),
    "jpeg2000-lossless": (JPEG2000Lossless, "YBR_RCT"),
}


def write_dicom_slide(
    folder: Path, levels: Sequence[NDArray[np.uint8]], *, encoding: str, mpp: float = 0.5, tile: int = 128
) -> list[Path]:
    """Write ``levels``, uint8 (height, width, 3), finest first, into ``folder`` as one series.

    Args:
        folder: made if it does not exist.
        levels: of one slide.
        encoding: a key of ``SYNTAXES``.
        mpp: um/px of level 0.
        tile: side of a frame, px.

    Returns:
        The files, finest first; their names tell nothing, as on an archive.
    """
    folder.mkdir(parents=True, exist_ok=True)
    study, series, frame_of_reference = generate_uid(), generate_uid(), generate_uid()
    paths = []
    for i, pixels in enumerate(levels):
        about = _level(pixels, encoding, mpp * levels[0].shape[1] / pixels.shape[1], tile)
        about.StudyInstanceUID, about.SeriesInstanceUID, about.FrameOfReferenceUID = study, series, frame_of_reference
        about.ImageType = ["ORIGINAL", "PRIMARY", "VOLUME", "NONE"] if i == 0 else [*_RESAMPLED]
        about.InstanceNumber = i + 1
        paths.append(folder / f"{about.SOPInstanceUID[-12:]}.dcm")
        about.save_as(paths[-1], enforce_file_format=True)
    return paths


_RESAMPLED = ("DERIVED", "PRIMARY", "VOLUME", "RESAMPLED")


def setting(**tags: Any) -> Callable[[Dataset], None]:
    """A change that gives a dataset these tags."""

    def change(dataset: Dataset) -> None:
        for name, value in tags.items():
            setattr(dataset, name, value)

    return change


def _level(pixels: NDArray[np.uint8], encoding: str, mpp: float, tile: int) -> FileDataset:
    syntax, photometric = SYNTAXES[encoding]
    meta = FileMetaDataset()
    meta.MediaStorageSOPClassUID = WHOLE_SLIDE_MICROSCOPY
    meta.MediaStorageSOPInstanceUID = generate_uid()
    meta.TransferSyntaxUID = syntax
    about = FileDataset("", {}, file_meta=meta, preamble=bytes(128))
    about.SOPClassUID, about.SOPInstanceUID = WHOLE_SLIDE_MICROSCOPY, meta.MediaStorageSOPInstanceUID
    about.Modality = "SM"
    height, width = pixels.shape[:2]
    frames = [
        _encoded(_frame(pixels, x, y, tile), encoding) for y in range(0, height, tile) for x in range(0, width, tile)
    ]
    about.NumberOfFrames = len(frames)
    about.Rows = about.Columns = tile
    about.TotalPixelMatrixColumns, about.TotalPixelMatrixRows, about.TotalPixelMatrixFocalPlanes = width, height, 1
    about.DimensionOrganizationType = "TILED_FULL"
    about.SamplesPerPixel, about.PhotometricInterpretation, about.PlanarConfiguration = 3, photometric, 0
    about.BitsAllocated = about.BitsStored = 8
    about.HighBit, about.PixelRepresentation = 7, 0
    about.ImagedVolumeWidth, about.ImagedVolumeHeight = width * mpp / 1000, height * mpp / 1000
    about.NumberOfOpticalPaths = 1
    path = Dataset()
    path.OpticalPathIdentifier = "1"
    about.OpticalPathSequence = [path]
    measures, shared = Dataset(), Dataset()
    measures.PixelSpacing = [mpp / 1000, mpp / 1000]
    measures.SliceThickness = 0.001
    shared.PixelMeasuresSequence = [measures]
    about.SharedFunctionalGroupsSequence = [shared]
    about.PixelData = b"".join(frames) if encoding == "raw" else encapsulate(frames)
    about["PixelData"].VR = "OB"
    about["PixelData"].is_undefined_length = encoding != "raw"
    return about


def _frame(pixels: NDArray[np.uint8], x: int, y: int, tile: int) -> NDArray[np.uint8]:
    frame = np.full((tile, tile, 3), 255, np.uint8)
    inside = pixels[y : y + tile, x : x + tile]
    frame[: inside.shape[0], : inside.shape[1]] = inside
    return frame


def _encoded(frame: NDArray[np.uint8], encoding: str) -> bytes:
    if encoding == "raw":
        return frame.tobytes()
    if encoding == "jpeg":
        return bytes(simplejpeg.encode_jpeg(frame, 90, colorsubsampling="422"))
    lossless = encoding == "jpeg2000-lossless"
    return bytes(
        imagecodecs.jpeg2k_encode(frame, level=0 if lossless else 40, codecformat="j2k", reversible=lossless, mct=True)
    )
