"""Writes DICOM Segmentations with highdicom, which knows nothing of our reader, onto slides of ``dicom_file``."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pydicom
from numpy.typing import NDArray
from pydicom.dataset import Dataset

ORIGIN_MM = (20.0, 40.0)


def write_segmentation(
    path: Path,
    values: NDArray[np.uint8],
    names: Mapping[int, str],
    kind: str = "BINARY",
    organization: str = "TILED_FULL",
    *,
    mpp: float = 0.5,
    tile: tuple[int, int] = (64, 64),
    syntax: str = "1.2.840.10008.1.2.1",
    slide: Path | None = None,
) -> Path:
    """Write ``values``, uint8 (height, width) or one plane of 0 and 1 for each segment in (height, width, segments).

    Args:
        path: the file to make.
        values: numbers of segments, 0 background.
        names: label by number, from 1 on.
        kind: BINARY, LABELMAP or FRACTIONAL.
        organization: TILED_FULL, or TILED_SPARSE without the frames that are empty.
        mpp: um/px of ``values``.
        tile: rows and columns of a frame.
        syntax: transfer syntax.
        slide: DICOM file of the slide whose series it is made of; None: of one that is not there.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of highdicom and pydicom, about each other
        import highdicom
        from pydicom.sr.codedict import codes

        segments = [
            highdicom.seg.SegmentDescription(number, label, codes.SCT.Tissue, codes.SCT.Tissue, "MANUAL")
            for number, label in names.items()
        ]
        made = highdicom.seg.Segmentation(
            [_source(values, mpp, slide)],
            values[None],
            kind,
            segments,
            *(highdicom.UID(), 2, highdicom.UID(), 1, "maker", "model", "1", "serial"),
            tile_pixel_array=True,
            tile_size=tile,
            dimension_organization_type=organization,
            omit_empty_frames=organization != "TILED_FULL",
            transfer_syntax_uid=syntax,
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        made.save_as(path)
    return path


def _source(values: NDArray[np.uint8], mpp: float, slide: Path | None) -> Dataset:
    """The header of a slide of the size of ``values``, of the series of ``slide``."""
    source = Dataset() if slide is None else pydicom.dcmread(slide, stop_before_pixels=True)
    if slide is None:
        source.StudyInstanceUID, source.SeriesInstanceUID, source.FrameOfReferenceUID = "1.2.1", "1.2.2", "1.2.3"
        source.SOPInstanceUID, source.SOPClassUID = "1.2.4", "1.2.840.10008.5.1.4.1.1.77.1.6"
    source.Modality = "SM"
    source.ImageType = ["ORIGINAL", "PRIMARY", "VOLUME", "NONE"]
    source.PatientID, source.PatientName, source.PatientBirthDate, source.PatientSex = "1", "A^B", "", "O"
    source.StudyDate = source.StudyTime = source.StudyID = source.AccessionNumber = source.ReferringPhysicianName = ""
    source.ContainerIdentifier, source.PositionReferenceIndicator = "glass", ""
    source.IssuerOfTheContainerIdentifierSequence = source.ContainerTypeCodeSequence = []
    source.SpecimenDescriptionSequence = []
    source.Rows = source.Columns = 64
    source.NumberOfFrames = -(-values.shape[0] // 64) * -(-values.shape[1] // 64)
    source.TotalPixelMatrixRows, source.TotalPixelMatrixColumns = values.shape[:2]
    source.TotalPixelMatrixFocalPlanes = 1
    source.DimensionOrganizationType = "TILED_FULL"
    add_placement(source)
    measures, shared = Dataset(), Dataset()
    measures.PixelSpacing, measures.SliceThickness = [mpp / 1000, mpp / 1000], 0.001
    shared.PixelMeasuresSequence = [measures]
    source.SharedFunctionalGroupsSequence = [shared]
    return source


def add_placement(dataset: Dataset) -> None:
    """Say where on the glass a slide lies, as scanners do."""
    origin = Dataset()
    origin.XOffsetInSlideCoordinateSystem, origin.YOffsetInSlideCoordinateSystem = ORIGIN_MM
    dataset.TotalPixelMatrixOriginSequence = [origin]
    dataset.ImageOrientationSlide = [0.0, -1.0, 0.0, -1.0, 0.0, 0.0]
