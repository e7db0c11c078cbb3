"""A share of the slides that one of several processes indexes, and the files of the others.

Takes ``2/8``; gives every eighth slide and a file name of its own, so that the tasks of an array job write into one
folder without a word to each other. Whoever comes later, a part or the whole, takes over what lies there.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from pipelines.catalog.catalog import SlideSpec
from pipelines.tiles.index_settings import IndexSettings, check_settings
from pipelines.tiles.tile_table import IndexedSlide, SlideFault, TileTable

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
    """One table of several; a slide of more than one is as the last of them has it. Slides are sorted by id, as if
    indexed in one go."""
    last = {slide: k for k, table in enumerate(tables) for slide in slides_of(table)}
    kept: list[TileTable] = []
    for k, table in enumerate(tables):
        ids = slides_of(table)
        own = [slide for slide in ids if last[slide] == k]
        kept.append(table if len(own) == len(ids) else table.of_slides(own))
    joined = TileTable.joined(settings, kept)
    return joined.of_slides(sorted(slides_of(joined)))


def slides_of(table: TileTable) -> list[str]:
    """Ids of its slides, those without tiles because of a fault included."""
    return [*table.slides, *(fault.slide_id for fault in table.faults)]


def take_over(
    table: TileTable, wanted: Mapping[str, tuple[int, float | None, int | None]], own: Path, *, faults: bool
) -> TileTable:
    """``table`` with what other index files of its folder know of ``wanted``.

    Args:
        table: the content of ``own``.
        wanted: slide id -> size of its file in bytes, mpp and scene asked for; a slide that was another then is
            left out.
        own: the file that ``table`` belongs to.
        faults: take over slides that failed, too.

    Raises:
        ValueError: a file next to ``own`` was made with other settings, or is no tile index.
    """
    files = {own.with_name(WHOLE_FILE), *own.parent.glob("tiles.part-*.parquet")} - {own}
    tables = []
    for path in sorted(path for path in files if path.exists()):
        other = TileTable.load(path)
        check_settings(other.settings, table.settings, path)
        tables.append(other.of_slides(_same(other, wanted, faults)))
    return merge(table.settings, [*tables, table]) if any(map(slides_of, tables)) else table


def _same(table: TileTable, wanted: Mapping[str, tuple[int, float | None, int | None]], faults: bool) -> Iterable[str]:
    known: list[IndexedSlide | SlideFault] = [*table.sources, *(table.faults if faults else ())]
    for slide in known:
        if wanted.get(slide.slide_id) == (slide.file_bytes, slide.asked_mpp, slide.scene):
            yield slide.slide_id
