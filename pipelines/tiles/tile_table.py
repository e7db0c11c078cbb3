"""The tile table: which tiles of which slides are tissue, with the settings that say so, in columns.

Takes numpy columns, or a Parquet file; gives the ``Region`` of each tile, the tiles of some slides, a Parquet file. The
file says in its metadata what it was made with, so that it is never used for something else. Each task of an array job
indexes an ``IndexPart`` of the slides; a later process takes over the files of the others.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from pipelines.catalog.catalog import SlideSpec
from pipelines.catalog.handles import SlideState
from pipelines.slides.geometry import Region
from pipelines.slides.whole_files import replacing
from pipelines.tiles.tiling import IndexSettings, check_settings

FORMAT = 1
"""Of the Parquet file, raised when an older one cannot be read."""

_METADATA_KEY = b"megatile"

Row = TypeVar("Row", "IndexedSlide", "SlideFault")


@dataclass(frozen=True)
class IndexedSlide:
    """Facts about a slide in the index: to recognise the slide later, and to show it.

    Attributes:
        tissue_share: the part of it that is tissue, 0 to 1.
        scene: of several images of the file, the one that was asked for.
    """

    slide_id: str
    file_bytes: int
    asked_mpp: float | None
    mpp: float
    width: int
    height: int
    backend: str
    modified_ns: int = 0
    digest: str = ""
    tissue_share: float | None = None
    scene: int | None = None

    @property
    def state(self) -> SlideState | None:
        """State of its file; None in an index that was made before this was kept."""
        return SlideState(self.file_bytes, self.modified_ns, self.digest) if self.digest else None


@dataclass(frozen=True)
class SlideFault:
    """Why a slide is not in the index. ``step`` is open, tissue, tiles, overlay or process."""

    slide_id: str
    file_bytes: int
    asked_mpp: float | None
    step: str
    error: str
    scene: int | None = None


@dataclass(frozen=True, eq=False)
class TileTable:
    """Tiles in columns, n rows, ordered by slide, then by row and column within the slide.

    Attributes:
        slides: slide ids; ``slide`` points into them.
        slide: int32 (n,).
        l0_x, l0_y: int64 (n,), top left of each tile in level-0 px.
        tissue: float32 (n,), the part of the tile that is tissue, 0 to 1.
        sources: one per slide, in the order of ``slides``; empty for a table that was not made from files.
        faults: slides that were tried and have no tiles.
        sides: int32 (n, 2), width and height in px of each tile; None where all have the side of the settings.
    """

    slides: tuple[str, ...]
    slide: NDArray[np.int32]
    l0_x: NDArray[np.int64]
    l0_y: NDArray[np.int64]
    tissue: NDArray[np.float32]
    settings: IndexSettings
    sources: tuple[IndexedSlide, ...] = ()
    faults: tuple[SlideFault, ...] = ()
    sides: NDArray[np.int32] | None = None

    @classmethod
    def joined(cls, settings: IndexSettings, tables: Sequence[TileTable]) -> Self:
        """One table of the tiles of several, of different slides and the same settings; an empty one of none."""
        starts = np.cumsum([0, *(len(table.slides) for table in tables)])
        shifted = [(t.slide + k).astype(np.int32) for t, k in zip(tables, starts, strict=False)]
        return cls(
            tuple(slide_id for table in tables for slide_id in table.slides),
            np.concatenate([np.empty(0, np.int32), *shifted]),
            np.concatenate([np.empty(0, np.int64), *(table.l0_x for table in tables)]),
            np.concatenate([np.empty(0, np.int64), *(table.l0_y for table in tables)]),
            np.concatenate([np.empty(0, np.float32), *(table.tissue for table in tables)]),
            settings,
            tuple(source for table in tables for source in table.sources),
            tuple(fault for table in tables for fault in table.faults),
            np.concatenate([np.empty((0, 2), np.int32), *(table.sides for table in tables if table.sides is not None)])
            if settings.tile == "slide"
            else None,
        )

    def __len__(self) -> int:
        return len(self.slide)

    def region(self, i: int) -> Region:
        """Return what to read for tile ``i``."""
        return Region(int(self.l0_x[i]), int(self.l0_y[i]), *self.size(i), self.settings.mpp)

    def size(self, i: int) -> tuple[int, int]:
        """Return width and height of tile ``i``, in px."""
        if self.sides is None:
            return self.settings.side, self.settings.side
        return int(self.sides[i, 0]), int(self.sides[i, 1])

    @property
    def pixels(self) -> NDArray[np.int64]:
        """px of each tile, int64 (n,)."""
        if self.sides is None:
            return np.full(len(self), self.settings.side**2, np.int64)
        counts: NDArray[np.int64] = self.sides.astype(np.int64).prod(1)
        return counts

    @property
    def largest(self) -> tuple[int, int]:
        """Width and height of the tile with the most px."""
        return self.size(int(self.pixels.argmax()))

    def slide_id(self, i: int) -> str:
        return self.slides[int(self.slide[i])]

    def tried(self, *, faults: bool) -> dict[str, tuple[int, float | None, int | None]]:
        """Return file size, mpp and scene asked for of each slide that has tiles or, with ``faults``, has failed."""
        slides: list[IndexedSlide | SlideFault] = [*(self.faults if faults else ()), *self.sources]
        return {slide.slide_id: (slide.file_bytes, slide.asked_mpp, slide.scene) for slide in slides}

    def select(self, rows: NDArray[np.int64]) -> Self:
        """Return the tiles at ``rows``, in that order; ``slides`` stay as they are."""
        columns = {name: getattr(self, name)[rows] for name in ("slide", "l0_x", "l0_y", "tissue")}
        return replace(self, **columns, sides=None if self.sides is None else self.sides[rows])

    def of_slides(self, ids: Iterable[str]) -> Self:
        """Return the tiles of these slides only; ``slides`` become those of ``ids`` that are known, in that order."""
        asked = tuple(dict.fromkeys(ids))
        positions = {slide_id: k for k, slide_id in enumerate(self.slides)}
        faults = {fault.slide_id: fault for fault in self.faults}
        kept = [positions[slide_id] for slide_id in asked if slide_id in positions]
        renumbered = np.full(len(self.slides), -1, np.int32)
        renumbered[kept] = np.arange(len(kept))
        slide = renumbered[self.slide]
        order = np.argsort(slide, kind="stable")
        rows = order[slide[order] >= 0]
        return replace(
            self.select(rows),
            slides=tuple(self.slides[k] for k in kept),
            slide=slide[rows],
            sources=tuple(self.sources[k] for k in kept) if self.sources else (),
            faults=tuple(faults[slide_id] for slide_id in asked if slide_id in faults),
        )

    def save(self, path: Path) -> None:
        """Write Parquet, atomically: columns slide, l0_x, l0_y, tissue, and width and height where they differ; the
        rest as JSON in the schema's metadata."""
        about = {
            "format": FORMAT,
            "settings": asdict(self.settings),
            "slides": list(self.slides),
            "sources": [asdict(source) for source in self.sources],
            "faults": [asdict(fault) for fault in self.faults],
        }
        columns = {
            "slide": pa.DictionaryArray.from_arrays(pa.array(self.slide), pa.array(self.slides, pa.string())),
            "l0_x": pa.array(self.l0_x),
            "l0_y": pa.array(self.l0_y),
            "tissue": pa.array(self.tissue),
        }
        if self.sides is not None:
            columns |= {"width": pa.array(self.sides[:, 0]), "height": pa.array(self.sides[:, 1])}
        table = pa.table(columns).replace_schema_metadata({_METADATA_KEY: json.dumps(about).encode()})
        with replacing(path) as temporary, temporary.open("wb") as file:
            pq.write_table(table, file)
            file.flush()
            os.fsync(file.fileno())

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read what ``save`` wrote.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: the file is not a tile index, or one of a newer format.
        """
        with path.open("rb") as file:
            try:
                table = pq.read_table(file)
                about: dict[str, Any] = json.loads(table.schema.metadata[_METADATA_KEY])
                if about["format"] == FORMAT:
                    return cls._from(table, about)
            except Exception as fault:  # of a damaged file, libraries raise anything
                what = f"{type(fault).__name__}: {fault}".splitlines()[0][:200]
                raise ValueError(
                    f"{path} is not a tile index of this program, or damaged ({what}); delete it to index anew"
                ) from fault
        raise ValueError(
            f"{path} has format {str(about['format'])[:40]}, this program reads {FORMAT}; delete it to index anew"
        )

    @classmethod
    def _from(cls, table: pa.Table, about: dict[str, Any]) -> Self:
        """The table of a file's columns and metadata; raises anything where they are damaged."""
        slides = tuple(about["slides"])
        settings = IndexSettings(**about["settings"])
        sources = tuple(_made(IndexedSlide, source) for source in about["sources"])
        if faults := settings.validate():
            raise ValueError("; ".join(faults))
        if [source.slide_id for source in sources] not in ([], list(slides)) or len(set(slides)) < len(slides):
            raise ValueError("its slides do not agree with each other")
        positions = {slide_id: k for k, slide_id in enumerate(slides)}
        column = table.column("slide").unify_dictionaries().combine_chunks()
        names = [positions[name] for name in column.dictionary.to_pylist()]
        slide = np.asarray(names, np.int32)[column.indices.to_numpy()] if len(table) else np.empty(0, np.int32)
        return cls(
            slides,
            slide,
            table.column("l0_x").to_numpy(),
            table.column("l0_y").to_numpy(),
            table.column("tissue").to_numpy(),
            settings,
            sources,
            tuple(_made(SlideFault, fault) for fault in about["faults"]),
            np.stack([table.column(name).to_numpy() for name in ("width", "height")], 1)
            if "width" in table.column_names
            else None,
        )


def _made(kind: type[Row], values: dict[str, Any]) -> Row:
    """A ``kind`` of ``values``, each of the type that its field has; older files have figures that are not used."""
    made = kind(**{name: value for name, value in values.items() if name in kind.__dataclass_fields__})
    for field in fields(made):
        value, wanted = getattr(made, field.name), str(field.type).split(" | ")
        if type(value).__name__.replace("NoneType", "None") not in wanted and not (
            type(value) is int and "float" in wanted
        ):
            raise TypeError(f"{field.name} is {str(value)[:40]!r}")
    return made


def three_sizes(table: TileTable) -> list[tuple[int, int]]:
    """Return width and height of the smallest, the median and the largest tile, by px."""
    order = np.argsort(table.pixels, kind="stable")
    return [table.size(int(row)) for row in order[[0, len(order) // 2, -1]]]


def sides_text(table: TileTable) -> str:
    """Return the sizes of tiles that differ, for a line of a log."""
    smallest, median, largest = (f"{width} x {height}" for width, height in three_sizes(table))
    return f"{smallest} (smallest), {median} (median) and {largest} px (largest)"


WHOLE_FILE = "tiles.parquet"


@dataclass(frozen=True, slots=True)
class IndexPart:
    """Part ``number`` of ``count``, from 1."""

    number: int
    count: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the part that ``2/8`` names.

        Raises:
            ValueError: text of another form, or a number that is not one of the parts.
        """
        match = re.fullmatch(r"(\d+)/(\d+)", text)
        if not match or not 1 <= int(match[1]) <= int(match[2]):
            raise ValueError(f"--part is one of several parts, such as 2/8, from 1/8 to 8/8; got {text!r}")
        return cls(int(match[1]), int(match[2]))

    @property
    def file_name(self) -> str:
        return f"tiles.part-{self.number}-of-{self.count}.parquet"

    def specs(self, specs: Sequence[SlideSpec]) -> tuple[SlideSpec, ...]:
        """Return the slides of this part; neighbours, which are often alike in size, go to different parts."""
        return tuple(specs[self.number - 1 :: self.count])


def merge(settings: IndexSettings, tables: Sequence[TileTable]) -> TileTable:
    """Return one table of several, sorted by slide; a slide of more than one is as the last of them has it."""
    last = {slide: k for k, table in enumerate(tables) for slide in slides_of(table)}
    kept: list[TileTable] = []
    for k, table in enumerate(tables):
        ids = slides_of(table)
        own = [slide for slide in ids if last[slide] == k]
        kept.append(table if len(own) == len(ids) else table.of_slides(own))
    joined = TileTable.joined(settings, kept)
    return joined.of_slides(sorted(slides_of(joined)))


def slides_of(table: TileTable) -> list[str]:
    """Return the ids of its slides, those without tiles because of a fault included."""
    return [*table.slides, *(fault.slide_id for fault in table.faults)]


def take_over(
    table: TileTable, wanted: Mapping[str, tuple[int, float | None, int | None]], own: Path, *, faults: bool
) -> TileTable:
    """``table`` with what other index files of its folder know of ``wanted``.

    Args:
        wanted: slides as in ``TileTable.tried``; one that was another then is left out.
        own: the file that ``table`` belongs to.
        faults: take over slides that failed, too, unless some file has their tiles.

    Raises:
        ValueError: a file next to ``own`` was made with other settings, or is no tile index.
    """
    tiles: list[TileTable] = []
    failed: list[TileTable] = []
    known = table.tried(faults=True)
    for path in sorted({*own.parent.glob(WHOLE_FILE), *own.parent.glob("tiles.part-*.parquet")} - {own}):
        other = TileTable.load(path)
        if not len(other) and other.settings != table.settings:  # every slide failed, perhaps because of its settings
            continue
        check_settings(other.settings, table.settings, path)
        same = {s for s, what in other.tried(faults=faults).items() if wanted.get(s) == what}
        tiles.append(other.of_slides(same.intersection(other.slides)))
        failed.append(other.of_slides(s for s in same.difference(other.slides) if known.get(s) != wanted[s]))
    new = any(map(slides_of, [*tiles, *failed]))
    return merge(table.settings, [*failed, table, *tiles]) if new else table
