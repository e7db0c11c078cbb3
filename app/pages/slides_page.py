"""A page of all slides of an index: their pictures, tiles and faults, hundreds of them, to be filtered and sorted.

Takes the index, its failed slides and small pictures; leaves ``slides.html``. Filters and orders are CSS: what a reader
chooses is a radio button, and each slide carries its place in each order. So nothing runs, as on every page, and the
pictures, which lie beside the page, are fetched when they come into view.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import numpy as np

from app.pages.html import Card, format_value, rendered
from app.pages.pictures import SmallPicture, class_rgb
from pipelines.slides.whole_files import write_text
from pipelines.tiles.index import TileTable

LITTLE_TISSUE, FEW_TILES = 0.05, 10
"""Part of a slide that is tissue, and number of tiles, below which a slide is listed as such."""


@dataclass(frozen=True)
class SlideRow:
    """One slide on the page.

    Attributes:
        tissue: part of it that is tissue; None: not known.
        flags: of all filters that it belongs to.
        faults: what went wrong, a line each.
    """

    slide_id: str
    tiles: int
    tissue: float | None
    flags: tuple[str, ...]
    faults: tuple[str, ...]


FILTERS: Mapping[str, str] = {"fault": "with faults", "pale": "little tissue", "few": "few tiles", "drawn": "annotated"}

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
        table: the index.
        failed: slide, step and error of ``failed_slides.csv``.
        pictures: by slide id.
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
        rows.append(
            SlideRow(
                slide_id,
                tiles,
                tissue,
                tuple(name for name, holds in flags.items() if holds),
                tuple(faults.get(slide_id, ())),
            )
        )
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
        rows: of the slides, by name.
        pictures: by slide id.
        classes: names by class id.
        what: a few words about the index.
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
            "picture": _link(path.parent, pictures.get(row.slide_id)),
            "figures": _figures(row),
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


def _link(folder: Path, picture: SmallPicture | None) -> tuple[str, str, int, int] | None:
    """Addresses of a small and the large picture, and width and height of the former."""
    if picture is None:
        return None
    large = picture.path.parent.parent / f"{picture.path.stem}.png"
    small, large_name = (quote(file.relative_to(folder).as_posix()) for file in (picture.path, large))
    return small, large_name, picture.width, picture.height


def _figures(row: SlideRow) -> str:
    """Tiles and tissue of a slide, in a line."""
    return f"{row.tiles} tiles" + ("" if row.tissue is None else f" · {row.tissue:.0%} tissue")
