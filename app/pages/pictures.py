"""Pictures of a report, and the page of all slides of an index: their pictures, tiles and errors.

Takes paths of picture files; returns small JPEG pictures as text that a page can hold. Takes the index, its failed
slides and small pictures; writes ``slides.html``. Filters and orders are CSS: a choice is a radio button, and each
slide carries its place in each order. So nothing runs, and the pictures, which are files next to the page, are fetched
when they come into view.
"""

from __future__ import annotations

import base64
import functools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import cv2
import numpy as np
from numpy.typing import NDArray

from app.pages.html import Card, format_value, rendered
from pipelines.catalog.catalog import SlideSpec
from pipelines.catalog.processes import WorkerCrashed, map_isolated
from pipelines.labels.annotations import SlideAnnotations
from pipelines.slides.geometry import Region
from pipelines.slides.slide import Pixels
from pipelines.slides.whole_files import write_text
from pipelines.tiles.overlay import CAPTION_PX
from pipelines.tiles.slide_index import slide_limits
from pipelines.tiles.tile_table import TileTable

OVERLAYS = 12
OVERLAY_PX = 320
"""Pictures of tissue on the page, and their longer side: twelve of them stay under half a megabyte."""
COLOURS = ((220, 30, 40), (0, 110, 255), (255, 170, 0), (0, 150, 80), (150, 60, 200), (0, 170, 190))
"""R, G, B of the classes shown, in their order, from the first again where there are more."""
STRONGEST = 0.6
"""Opacity of a class that is certain: the tissue must stay visible below."""
PLAIN, ANNOTATED = "small", "annotated"
"""Folders of the pictures, in ``tissue/``."""
PICTURE_PX = 420
"""Longer side: twice what a page shows, for fine screens; about 20 kB."""
CLASS_RGB = ((214, 39, 40), (148, 103, 189), (140, 86, 75), (23, 150, 160), (190, 120, 0), (227, 20, 150))
"""Of classes, in turn; not those of tissue and tiles."""
Lines = Mapping[int, Sequence[NDArray[np.int32]]]
"""Closed lines in px of a picture, by class id."""
LITTLE_TISSUE, FEW_TILES = 0.05, 10
"""Part of a slide that is tissue, and number of tiles, below which a slide is listed as such."""
FILTERS: Mapping[str, str] = {"fault": "with faults", "pale": "little tissue", "few": "few tiles", "drawn": "annotated"}


def overlays(tissue: Path, paths: Sequence[Path]) -> list[tuple[str, str]]:
    """Return slide ids and base64 JPEGs of some of ``paths`` in ``tissue``, evenly chosen, without those that cannot be
    decoded."""
    shown = min(OVERLAYS, len(paths))
    chosen = [paths[i * len(paths) // shown] for i in range(shown)]
    names = [path.relative_to(tissue).as_posix().removesuffix(".png") for path in chosen]
    return [(name, jpeg) for name, path in zip(names, chosen, strict=True) if (jpeg := small_jpeg(path, OVERLAY_PX))]


def small_jpeg(path: Path, px: int) -> str:
    """Return the picture in ``path``, with sides of at most ``px``, as base64; "" when it cannot be decoded: a report
    is not where that should fail."""
    picture = decoded(path) if path.is_file() else None
    return "" if picture is None else base64.b64encode(as_jpeg(shrunk(picture, px))).decode()


def decoded(path: Path) -> Pixels | None:
    """Return the picture in ``path`` as uint8 (h, w, 3), BGR; None where it cannot be decoded."""
    picture: Any = cv2.imdecode(np.fromfile(path, np.uint8), cv2.IMREAD_COLOR) if path.stat().st_size else None
    return None if picture is None else picture.astype(np.uint8, copy=False)


def shrunk(picture: Pixels, px: int) -> Pixels:
    """Return a picture with sides of at most ``px``."""
    scale = min(1.0, px / max(picture.shape[:2]))
    size = (max(1, round(picture.shape[1] * scale)), max(1, round(picture.shape[0] * scale)))
    small: Pixels = cv2.resize(picture, size, interpolation=cv2.INTER_AREA).astype(np.uint8, copy=False)
    return small


def as_jpeg(picture: Pixels) -> bytes:
    """Return a BGR picture as a JPEG."""
    return cv2.imencode(".jpg", picture, [cv2.IMWRITE_JPEG_QUALITY, 80])[1].tobytes()


def as_png(picture: NDArray[np.uint8]) -> bytes:
    """Return an RGB picture, or grey levels, as a PNG."""
    return cv2.imencode(".png", picture[..., ::-1] if picture.ndim == 3 else picture)[1].tobytes()


def colour_of(number: int) -> tuple[int, int, int]:
    """Return R, G, B of the class shown number ``number``, from 0."""
    return COLOURS[number % len(COLOURS)]


def tinted(pixels: Pixels, probabilities: NDArray[np.uint8], covered: tuple[int, int] | None = None) -> Pixels:
    """Return ``pixels`` (h, w, 3) with each class's colour mixed in by its probability, uint8 (classes, any, any).

    Args:
        covered: width and height of the probabilities in px of the picture, which they may reach beyond; None: its own.
    """
    height, width = pixels.shape[:2]
    mixed = pixels.astype(np.float32)
    for number, share in enumerate(probabilities):
        shrinks = share.shape[0] > height
        size = covered or (width, height)
        fitted = cv2.resize(share, size, interpolation=cv2.INTER_AREA if shrinks else cv2.INTER_LINEAR)
        opacity = fitted[:height, :width].astype(np.float32)[..., None] * (STRONGEST / 255)
        mixed += opacity * (np.array(colour_of(number), np.float32) - mixed)
    return np.rint(mixed).astype(np.uint8)


@dataclass(frozen=True)
class SmallPicture:
    """A picture of a slide.

    Attributes:
        classes: ids of those outlined on it.
        fault: why its annotation is not outlined.
    """

    path: Path
    width: int
    height: int
    classes: tuple[int, ...] = ()
    fault: str = ""


def small_pictures(
    tissue: Path, specs: Sequence[SlideSpec], truth: SlideAnnotations | None, workers: int
) -> dict[str, SmallPicture]:
    """Return a small picture, by slide id, of every slide that has one in the folder ``tissue``, and write it there.

    Args:
        tissue: the pictures that the index has made.
        truth: what is drawn on them.
        workers: processes that open slides, and threads that decode pictures.
    """
    for name in (PLAIN, ANNOTATED):
        (tissue / name).mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(workers) as pool:
        made = pool.map(lambda spec: _plain(tissue, spec.slide_id), specs)
        pictures = {spec.slide_id: picture for spec, picture in zip(specs, made, strict=True) if picture}
    if truth is None:
        return pictures
    has_both = pictures.keys() & truth.paths.keys()
    drawn = [(spec, pictures[spec.slide_id]) for spec in specs if spec.slide_id in has_both]
    outline = functools.partial(outlines, truth=truth)
    for (spec, picture), lines in map_isolated(outline, drawn, workers, slide_limits(1)) if drawn else ():
        if isinstance(lines, str | WorkerCrashed):
            pictures[spec.slide_id] = replace(picture, fault=str(lines))
            continue
        annotated, path = decoded(picture.path), tissue / ANNOTATED / f"{spec.slide_id}.jpg"
        assert annotated is not None
        for number, contours in lines.items():
            cv2.drawContours(annotated, list(contours), -1, class_rgb(number)[::-1], 2, cv2.LINE_AA)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(as_jpeg(annotated))
        pictures[spec.slide_id] = replace(picture, path=path, classes=tuple(lines))
    return pictures


def outlines(drawn: tuple[SlideSpec, SmallPicture], truth: SlideAnnotations) -> Lines | str:
    """Return the outlines of what is drawn on a slide, in px of its picture, or what is wrong with the slide or its
    annotation."""
    spec, picture = drawn
    mask = np.empty((picture.height, picture.width), np.uint8)
    try:
        with spec.open() as slide:
            bounds = slide.bounds
            truth.outside(spec.slide_id, slide.levels[0].width, slide.levels[0].height, bounds)
            mpp = slide.mpp * max(bounds.width / picture.width, bounds.height / picture.height)
            region = Region(bounds.l0_x, bounds.l0_y, picture.width, picture.height, mpp)
            truth.read_mask(spec.slide_id, slide, region, mask)
    except Exception as fault:  # slide libraries raise anything; the page has the other slides
        return str(fault) or type(fault).__name__
    present = [number for number in np.unique(mask).tolist() if 0 < number < len(truth.classes)]
    return {
        number: cv2.findContours((mask == number).view(np.uint8), cv2.RETR_CCOMP, cv2.CHAIN_APPROX_SIMPLE)[0]
        for number in present
    }


def class_rgb(number: int) -> tuple[int, int, int]:
    """Return the colour of a class, by its id from 1."""
    return CLASS_RGB[(number - 1) % len(CLASS_RGB)]


def _plain(tissue: Path, slide_id: str) -> SmallPicture | None:
    """The picture of tissue and tiles without its caption; made anew when that of the index is newer."""
    large, path = tissue / f"{slide_id}.png", tissue / PLAIN / f"{slide_id}.jpg"
    if not large.is_file():
        return None
    picture: Pixels | None = None
    if path.is_file() and path.stat().st_mtime_ns > large.stat().st_mtime_ns:
        picture = decoded(path)
    if picture is None:
        whole = decoded(large)
        if whole is None:
            return None
        picture = shrunk(whole[:-CAPTION_PX], PICTURE_PX)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(as_jpeg(picture))
    return SmallPicture(path, picture.shape[1], picture.shape[0])


@dataclass(frozen=True)
class SlideRow:
    """One slide on the page.

    Attributes:
        tissue: part of it that is tissue; None: not known.
        flags: of all filters that it belongs to.
    """

    slide_id: str
    tiles: int
    tissue: float | None
    flags: tuple[str, ...]
    faults: tuple[str, ...]


ORDERS: Mapping[str, tuple[str, Callable[[SlideRow], tuple[float, ...]]]] = {
    "name": ("name", lambda row: ()),
    "faults": ("faults first", lambda row: (-len(row.faults), -len(row.flags))),
    "tissue": ("least tissue", lambda row: (-1.0 if row.tissue is None else row.tissue,)),
    "tiles": ("fewest tiles", lambda row: (row.tiles,)),
}


def slide_rows(
    table: TileTable, failed: Sequence[tuple[str, str, str]], pictures: Mapping[str, SmallPicture]
) -> list[SlideRow]:
    """Return a row for every slide that has tiles or has failed, by name.

    Args:
        failed: slide, step and error of ``failed_slides.csv``.
    """
    faults: dict[str, list[str]] = {}
    for slide_id, step, error in failed:
        faults.setdefault(slide_id, []).append(f"{step}: {error.partition(chr(10))[0]}")
    for slide_id, picture in pictures.items():
        if picture.fault:
            faults.setdefault(slide_id, []).append(f"annotation: {picture.fault.partition(chr(10))[0]}")
    counts = np.bincount(table.slide, minlength=len(table.slides)).tolist()
    sources = dict(zip(table.slides, zip(table.sources, counts, strict=True), strict=True))
    rows = []
    for slide_id in sorted({*sources, *faults}):
        source, tiles = sources.get(slide_id, (None, 0))
        tissue = source.tissue_share if source else None
        flags = {
            "fault": slide_id in faults,
            "pale": tissue is not None and tissue < LITTLE_TISSUE,
            "few": not table.settings.one_tile_each and tiles < FEW_TILES,
            "drawn": slide_id in pictures and bool(pictures[slide_id].classes),
        }
        held = tuple(name for name, holds in flags.items() if holds)
        rows.append(SlideRow(slide_id, tiles, tissue, held, tuple(faults.get(slide_id, ()))))
    return rows


def write_slides_page(
    path: Path,
    rows: Sequence[SlideRow],
    pictures: Mapping[str, SmallPicture],
    classes: Sequence[str],
    what: Sequence[str],
) -> Path:
    """Write the page and give its path.

    Args:
        path: of the page; pictures are named from its folder.
        classes: names by class id.
    """
    places = {
        name: {row.slide_id: place for place, row in enumerate(sorted(rows, key=key))}
        for name, (_, key) in ORDERS.items()
    }
    counts = {name: sum(name in row.flags for row in rows) for name in FILTERS}
    slides = [
        {
            "row": row,
            "order": "".join(f"--{name}:{place[row.slide_id]};" for name, place in places.items()),
            "picture": _link(path.parent, row.slide_id, pictures.get(row.slide_id)),
            "figures": f"{row.tiles} tiles" + ("" if row.tissue is None else f" · {row.tissue:.0%} tissue"),
        }
        for row in rows
    ]
    cards = [
        Card("Slides", format_value(len(rows))),
        Card("Tiles", format_value(sum(row.tiles for row in rows))),
        Card(FILTERS["fault"].capitalize(), format_value(counts["fault"])),
    ]
    shown = sorted({number for picture in pictures.values() for number in picture.classes})
    page = rendered(
        "slides.html.j2",
        what=what,
        cards=cards,
        filters={name: (text, counts[name]) for name, text in FILTERS.items() if counts[name]},
        orders={name: text for name, (text, _) in ORDERS.items()},
        slides=slides,
        classes=[(classes[number], "#{:02x}{:02x}{:02x}".format(*class_rgb(number))) for number in shown],
        little=f"{LITTLE_TISSUE:.0%}",
        few=FEW_TILES,
    )
    return write_text(path, page)


def _link(folder: Path, slide_id: str, picture: SmallPicture | None) -> tuple[str, str, int, int] | None:
    """Addresses of a small and the large picture, and width and height of the former."""
    if picture is None:
        return None
    large = picture.path.parents[slide_id.count("/") + 1] / f"{slide_id}.png"
    small, large_name = (quote(file.relative_to(folder).as_posix()) for file in (picture.path, large))
    return small, large_name, picture.width, picture.height
