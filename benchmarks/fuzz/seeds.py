"""The whole files that are damaged: one for each format that the project reads.

Takes a folder; leaves small slides, pictures, masks and tables in it, real ones where the repository ships them. All
show tissue, so that the index keeps tiles of every slide.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import cv2
import numpy as np
import tifffile
import zarr
import zarr.codecs
from PIL import Image

from pipelines.backends.registry import open_slide
from pipelines.backends.tiff_writer import JPEG, TILE, PyramidWriter
from pipelines.slides.geometry import Region, Size
from pipelines.slides.slide import Pixels
from tests.helpers.ndpi_file import write_ndpi

REAL = Path(__file__).parents[2] / "data" / "real"
MPP = 0.5
WIDTH, HEIGHT = 3 * TILE, 2 * TILE
SMALL_TILE = 128
SLIDES_OF_A_TABLE = 6

ENCODINGS = {
    "tiff-raw": {},
    "tiff-deflate": {"compression": "zlib"},
    "tiff-lzw": {"compression": "lzw", "predictor": True},
    "tiff-jpeg2000": {"compression": "jpeg2000"},
}
"""Format -> what tifffile is told for it."""

COPIED = {"svs": "CMU-1-Small-Region.svs", "ndpi": "test3-DAPI-2-387.ndpi", "dicom": "highdicom_sm_image.dcm"}
"""Format -> real slide."""


def _picture() -> Pixels:
    """Tissue, uint8 (``HEIGHT``, ``WIDTH``, 3)."""
    with open_slide(REAL / COPIED["svs"]) as slide:
        return slide.read(Region(400, 400, WIDTH, HEIGHT, slide.mpp))


def _reduced(picture: Pixels, factor: int) -> Pixels:
    size = (WIDTH // factor, HEIGHT // factor)
    return np.ascontiguousarray(cv2.resize(picture, size, interpolation=cv2.INTER_AREA))


def _own_tiff(path: Path, picture: Pixels) -> None:
    with PyramidWriter(path, Size(WIDTH, HEIGHT), MPP, "MegaTile sample", JPEG, longest=WIDTH // 2) as writer:
        writer.add(picture)


def _tiff(path: Path, picture: Pixels, **encoding: object) -> None:
    with tifffile.TiffWriter(path) as writer:
        for level in range(2):
            writer.write(
                _reduced(picture, 1 << level),
                tile=(SMALL_TILE, SMALL_TILE),
                photometric="rgb",
                resolution=(1e4 / MPP / (1 << level),) * 2,
                resolutionunit="CENTIMETER",
                subfiletype=int(level > 0),
                metadata=None,
                **encoding,
            )


def _ome_tiff(path: Path, picture: Pixels) -> None:
    options = {"tile": (SMALL_TILE, SMALL_TILE), "photometric": "rgb", "compression": "zlib"}
    size = {"PhysicalSizeX": MPP, "PhysicalSizeXUnit": "µm", "PhysicalSizeY": MPP, "PhysicalSizeYUnit": "µm"}
    with tifffile.TiffWriter(path, ome=True) as writer:
        writer.write(picture, subifds=1, metadata={"axes": "YXS", **size}, **options)
        writer.write(_reduced(picture, 2), subfiletype=1, **options)


def _zarr2(path: Path, picture: Pixels) -> None:
    """OME-Zarr 0.4 of one uncompressed array (c, y, x)."""
    # Without the zarr library, which adds an empty ``0/.zattrs``: it holds no value to damage.
    array = path / "0"
    array.mkdir(parents=True)
    axes = [{"name": "c", "type": "channel"}] + [{"name": n, "type": "space", "unit": "micrometer"} for n in "yx"]
    scale = [{"type": "scale", "scale": [1.0, MPP, MPP]}]
    image = {"version": "0.4", "axes": axes, "datasets": [{"path": "0", "coordinateTransformations": scale}]}
    shape = {"shape": [3, HEIGHT, WIDTH], "chunks": [3, TILE, TILE], "dtype": "|u1", "order": "C"}
    rest = {"zarr_format": 2, "compressor": None, "filters": None, "fill_value": 0}
    (path / ".zgroup").write_text(json.dumps({"zarr_format": 2}))
    (path / ".zattrs").write_text(json.dumps({"multiscales": [image]}))
    (array / ".zarray").write_text(json.dumps(shape | rest))
    for row, column in np.ndindex(HEIGHT // TILE, WIDTH // TILE):
        tile = picture[row * TILE : (row + 1) * TILE, column * TILE : (column + 1) * TILE]
        (array / f"0.{row}.{column}").write_bytes(tile.transpose(2, 0, 1).tobytes())


def _zarr3(path: Path, picture: Pixels) -> None:
    """OME-Zarr 0.5 of two levels under Zstandard."""
    axes = [{"name": "y", "type": "space", "unit": "micrometer"}, {"name": "x", "type": "space", "unit": "micrometer"}]
    datasets = []
    group = zarr.open_group(path, mode="w", zarr_format=3)
    for level in range(2):
        pixels = _reduced(picture, 1 << level)
        group.create_array(
            str(level), data=pixels, chunks=(SMALL_TILE, SMALL_TILE, 3), compressors=[zarr.codecs.ZstdCodec()]
        )
        scale = {"type": "scale", "scale": [MPP * (1 << level)] * 2 + [1.0]}
        datasets.append({"path": str(level), "coordinateTransformations": [scale]})
    image = {"axes": [*axes, {"name": "c", "type": "channel"}], "datasets": datasets}
    group.attrs["ome"] = {"version": "0.5", "multiscales": [image]}


def _mask() -> Pixels:
    mask = np.zeros((HEIGHT, WIDTH), np.uint8)
    mask[100:300, 150:500] = 1
    mask[300:450, 300:700] = 2
    return mask


def _geojson(path: Path) -> None:
    ring = [[100, 100], [500, 100], [500, 400], [100, 400], [100, 100]]
    features = [
        {
            "type": "Feature",
            "geometry": {"type": "Polygon", "coordinates": [[[x + 60 * k, y] for x, y in ring]]},
            "properties": {"objectType": "annotation", "classification": {"name": name, "color": [200, 0, 0]}},
        }
        for k, name in enumerate(("tumour", "stroma"))
    ]
    hole, crossing = [[x / 2 + 100, y / 2 + 80] for x, y in ring], [ring[0], ring[2], ring[1], ring[3], ring[0]]
    parts = {"type": "MultiPolygon", "coordinates": [[ring, hole], [crossing]]}
    point = {"type": "Point", "coordinates": [5, 5]}
    features += [{"type": "Feature", "geometry": geometry, "properties": {}} for geometry in (parts, point)]
    path.write_text(json.dumps({"type": "FeatureCollection", "features": features}))


BOX = ((100, 100), (500, 100), (500, 400), (100, 400))
CROSSING = ((300, 300), (700, 300), (700, 450), (400, 450), (400, 200), (600, 200), (600, 480), (300, 480))


def _asap(path: Path) -> None:
    areas = (("tumour", "Polygon", BOX), ("stroma", "Spline", CROSSING), ("Exclusion", "Rectangle", BOX[1:]))
    lines = ['<?xml version="1.0"?>', "<ASAP_Annotations><Annotations>"]
    for k, (group, kind, points) in enumerate((*areas, ("tumour", "Dot", BOX[:1]))):
        lines.append(f'<Annotation Name="{k}" Type="{kind}" PartOfGroup="{group}" Color="#F4FA58"><Coordinates>')
        lines += [f'<Coordinate Order="{i}" X="{x}" Y="{y}"/>' for i, (x, y) in enumerate(points)]
        lines.append("</Coordinates></Annotation>")
    groups = [f'<Group Name="{name}" PartOfGroup="None"/>' for name in ("tumour", "stroma", "Exclusion")]
    lines += ["</Annotations><AnnotationGroups>", *groups, "</AnnotationGroups></ASAP_Annotations>"]
    path.write_text("\n".join(lines))


def _imagescope(path: Path) -> None:
    layers = (
        ("tumour", ((0, 0, BOX), (0, 1, BOX[:2]), (2, 0, BOX[1::2]))),
        ("stroma", ((1, 0, BOX[::2]), (5, 0, BOX))),
    )
    lines = ['<?xml version="1.0"?>', '<Annotations MicronsPerPixel="0.5">']
    for k, (name, regions) in enumerate(layers, 1):
        lines.append(f'<Annotation Id="{k}" Name="{name}" Type="4"><Attributes/><Regions>')
        for i, (kind, negative, points) in enumerate(regions, 1):
            lines.append(f'<Region Id="{i}" Type="{kind}" NegativeROA="{negative}"><Vertices>')
            lines += [f'<Vertex X="{x}" Y="{y}" Z="0"/>' for x, y in points]
            lines.append("</Vertices></Region>")
        lines.append("</Regions></Annotation>")
    path.write_text("\n".join([*lines, "</Annotations>"]))


def _labels(path: Path) -> None:
    rows = [f"s{k},{'tumour' if k % 2 else 'normal'},p{k // 2},0.5" for k in range(SLIDES_OF_A_TABLE)]
    path.write_text("slide,label,patient,mpp\n" + "\n".join(rows) + "\n")


def write_seeds(folder: Path, formats: list[str]) -> dict[str, Path]:
    """Write the whole file, or folder, of each of ``formats``; format -> path."""
    folder.mkdir(parents=True, exist_ok=True)
    picture = _picture()
    paths = {name: folder / file for name, (file, _) in WRITERS.items()}
    for name in formats:
        if name in COPIED:
            shutil.copyfile(REAL / COPIED[name], paths[name])
        else:
            WRITERS[name][1](paths[name], picture)
    return {name: paths[name] for name in formats}


WRITERS: dict[str, tuple[str, Callable[[Path, Pixels], object]]] = {
    "svs": ("s.svs", lambda path, picture: None),
    "tiff-jpeg": ("jpeg.tif", _own_tiff),
    **{
        name: (f"{name}.tif", lambda path, picture, encoding=encoding: _tiff(path, picture, **encoding))
        for name, encoding in ENCODINGS.items()
    },
    "ome-tiff": ("s.ome.tif", _ome_tiff),
    "ndpi": ("s.ndpi", lambda path, picture: None),
    "ndpi-made": ("made.ndpi", lambda path, picture: write_ndpi(path, picture, interval=WIDTH // 16)),
    "dicom": ("s.dcm", lambda path, picture: None),
    "ome-zarr-0.4": ("s.zarr", _zarr2),
    "ome-zarr-0.5": ("s5.ome.zarr", _zarr3),
    "png": ("p.png", lambda path, picture: Image.fromarray(picture).save(path)),
    "jpeg": ("p.jpg", lambda path, picture: Image.fromarray(picture).save(path, quality=90)),
    "tiff-strips": ("strips.tif", lambda path, picture: Image.fromarray(picture).save(path, compression="tiff_lzw")),
    "mask-tiff": (
        "m_mask.tif",
        lambda path, picture: tifffile.imwrite(path, _mask(), tile=(SMALL_TILE, SMALL_TILE), compression="zlib"),
    ),
    "mask-png": ("m_mask.png", lambda path, picture: Image.fromarray(_mask()).save(path)),
    "geojson": ("m.geojson", lambda path, picture: _geojson(path)),
    "asap": ("m-asap.xml", lambda path, picture: _asap(path)),
    "imagescope": ("m-imagescope.xml", lambda path, picture: _imagescope(path)),
    "labels": ("labels.csv", lambda path, picture: _labels(path)),
}
"""Format -> file name and what writes it; real slides are copied."""

FORMATS = tuple(WRITERS)
