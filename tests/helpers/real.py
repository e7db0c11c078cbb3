"""Where the shipped real slides are."""

from pathlib import Path

REAL = Path(__file__).parents[2] / "data" / "real"
NUCLEI = REAL.parent / "nuclei"

SVS = REAL / "CMU-1-Small-Region.svs"
NDPI = REAL / "test3-DAPI-2-387.ndpi"
PYRAMID_TIFF = REAL / "cmu-small_pyramid_jpeg.tif"
OME_TIFF = REAL / "cmu-small.ome.tif"
DICOM = REAL / "highdicom_sm_image.dcm"
