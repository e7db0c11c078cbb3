"""Which tiles are cut: what a user asks of an index, and whether that is what another was made with."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

from pipelines.slides.geometry import MPP_MAX, MPP_MIN
from pipelines.slides.rare import Rare

WHOLE_SLIDE_MULTIPLE = 32
"""px that the sides of a whole slide are multiples of: models halve them five times."""


@dataclass(frozen=True)
class IndexSettings:
    """Which tiles are cut. Two indexes are interchangeable when these agree."""

    tile: int | Literal["slide"] = 1024
    """Side of the square tiles, in px at --mpp. slide: one tile for each slide, the rectangle around its tissue, of
    whatever size that has."""
    mpp: float = 0.5
    """Resolution the tiles are read at, in um/px."""
    stride: Rare[int | None] = None
    """Step from tile to tile, px at --mpp; default: the tile's side. --tile slide: sides are multiples of it (32)."""
    min_tissue: float = 0.25
    """Least part of a tile that is tissue, 0 to 1; 0 keeps every tile. --tile slide: any tissue is enough."""
    pictures: Rare[Literal["tiles", "resize"]] = "tiles"
    """PNG and JPEG files. tiles: slides, cut into tiles; resize: each one image with one class, resized to --tile."""
    tissue_mpp: Rare[float] = 8.0
    """Resolution at which tissue is looked for, in um/px; coarser where that would take more than 40 million px."""

    @property
    def one_tile_each(self) -> bool:
        """Return whether a slide is one tile."""
        return self.tile == "slide" or self.whole_pictures

    @property
    def whole_pictures(self) -> bool:
        """Return whether each slide is a picture that is resized to a tile."""
        return self.pictures == "resize"

    @property
    def side(self) -> int:
        """Side of the tiles in px, where they are squares of one size."""
        assert self.tile != "slide"
        return self.tile

    def validate(self) -> list[str]:
        """Return every fault of these settings, each with its rule and the value received."""
        if self.whole_pictures:
            return self._picture_faults()
        faults = []
        if self.tile == "slide":
            if self.stride is not None and self.stride < 1:
                faults.append(f"--stride is at least 1 px with --tile slide; got {self.stride}")
        else:
            faults += self._side_faults(self.tile)
        if not MPP_MIN <= self.mpp <= MPP_MAX:
            faults.append(f"--mpp is {MPP_MIN:g} to {MPP_MAX:g} um/px; got {self.mpp:g}")
        if not 0 <= self.min_tissue <= 1:
            faults.append(f"--min-tissue is a part of a tile, 0 to 1; got {self.min_tissue:g}")
        if not MPP_MIN <= self.tissue_mpp <= MPP_MAX:
            faults.append(f"--tissue-mpp is {MPP_MIN:g} to {MPP_MAX:g} um/px; got {self.tissue_mpp:g}")
        elif not faults and self.tile != "slide" and self.tile * self.mpp < self.tissue_mpp:
            faults.append(
                f"a tile ({self.tile} px at {self.mpp:g} um/px) is smaller than one px of the tissue mask "
                f"({self.tissue_mpp:g} um); ask for a larger --tile or a finer --tissue-mpp"
            )
        return faults

    def _picture_faults(self) -> list[str]:
        """Errors of settings for whole pictures, which need the tile alone."""
        faults = []
        if self.tile == "slide" or self.tile < 1:
            faults.append(f"--pictures resize needs a --tile of at least 1 px; got {self.tile}")
        for name in ("mpp", "stride", "min_tissue"):
            value = getattr(self, name)
            if value != getattr(IndexSettings, name):
                flag = name.replace("_", "-")
                faults.append(f"--{flag} says nothing of --pictures resize, which takes whole pictures; got {value:g}")
        return faults

    def _side_faults(self, tile: int) -> list[str]:
        faults = [] if tile >= 1 else [f"--tile is at least 1 px, or slide; got {tile}"]
        if self.stride is not None and not 1 <= self.stride <= tile:
            faults.append(f"--stride is 1 to --tile ({tile}) px, or tiles leave gaps; got {self.stride}")
        return faults


def check_settings(made_with: IndexSettings, asked: IndexSettings, where: Path) -> None:
    """Refuse an index that was made with other settings.

    Raises:
        ValueError: names every differing key, the value found, the value asked for, the file, and what to do.
    """
    differing = [
        f"{f.name} is {getattr(made_with, f.name)} there, {getattr(asked, f.name)} was asked for"
        for f in fields(IndexSettings)
        if getattr(made_with, f.name) != getattr(asked, f.name)
    ]
    if differing:
        raise ValueError(
            f"{where} was made with other settings: {'; '.join(differing)}. "
            "Give another --out, or the same settings as before"
        )
