"""From a folder to the pictures of the study, in memory: of any image folder, or cut from slides.

Takes a folder with a sub-folder per class, ``train`` and ``val`` above them or not; or slides with a label each. Gives
``Pictures``, uint8, the same for all modes. Slide libraries are imported where slides are read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from PIL import Image
from torch import Tensor

if TYPE_CHECKING:
    from pipelines.slides.slide import Slide

SUFFIXES = (".jpg", ".jpeg", ".png", ".tif", ".tiff", ".bmp", ".webp")
FORMATS = ("JPEG", "PNG", "TIFF", "BMP", "WEBP")
VALIDATION = 0.385
"""Part of the pictures that validates where the folder does not say: as in the study's own set, 153 of 397."""
TISSUE = 0.25
"""Least part of a tile that is tissue."""
MARGIN = 1.15
"""The shorter side of a picture before its middle is taken, over the side that is taken."""


@dataclass(frozen=True, eq=False)
class Pictures:
    """Of one classification.

    Attributes:
        train, val: uint8 (n, 3, px, px).
        train_labels, val_labels: int64 (n,).
        classes: names by label.
        source: where they come from, for the report.
    """

    train: Tensor
    train_labels: Tensor
    val: Tensor
    val_labels: Tensor
    classes: tuple[str, ...]
    source: str


def pictures_of_folder(root: Path, px: int, most: int | None = None) -> Pictures:
    """Pictures below ``root``, the middle of each at ``px``.

    Args:
        root: with a sub-folder per class, or with ``train`` and ``val`` that have them.
        px: side.
        most: pictures to take, evenly over each class; None: all.

    Raises:
        ValueError: fewer than two classes, or a class without pictures.
    """
    split = (root / "train").is_dir() and (root / "val").is_dir()
    parts = [root / "train", root / "val"] if split else [root]
    classes = sorted({folder.name for part in parts for folder in part.iterdir() if folder.is_dir()})
    if len(classes) < 2:
        raise ValueError(
            f"--images {root} needs a sub-folder per class, two or more, below train/ and val/ or not; found "
            f"{', '.join(classes) or 'none'}"
        )
    files = [[_files(part / name) for name in classes] for part in parts]
    empty = [classes[k] for k, found in enumerate(files[0]) if len(found) < 2]
    if empty:
        raise ValueError(f"--images {root}: class {empty[0]!r} has fewer than two pictures ({', '.join(SUFFIXES)})")
    total = sum(len(found) for part in files for found in part)
    files = [[_even(found, most and max(2, most * len(found) // total)) for found in part] for part in files]
    sides = files if split else list(zip(*map(_parted, files[0]), strict=True))
    train, val = ([(path, k) for k, found in enumerate(side) for path in found] for side in sides)
    source = f"{len(train)} + {len(val)} pictures of {root.name}"
    return _stacked(
        [(_read(path, px), k) for path, k in train], [(_read(path, px), k) for path, k in val], classes, source
    )


def pictures_of_slides(root: Path, px: int, most: int, labels: Path | None = None) -> Pictures:
    """Tiles of tissue at the finest level, ``px`` wide and without overlap; the right part of each slide validates.

    Args:
        root: folder of slides.
        most: tiles to take, evenly over the classes and over each slide.
        labels: table with columns slide and label; None: as ``app.train`` finds them.

    Raises:
        ValueError: no slides, no labels, or a class without enough tiles.
    """
    from pipelines.catalog.catalog import find_slides
    from pipelines.labels.slide_labels import SlideLabels, find_labels

    specs = find_slides(root)
    found = find_labels(root, specs, labels=labels)
    if not isinstance(found, SlideLabels):
        raise ValueError(f"--slides {root}: the study classifies, and these slides are annotated; give --labels")
    labelled = [spec for spec in specs if spec.slide_id in found.label]
    sides: tuple[list[tuple[Tensor, int]], list[tuple[Tensor, int]]] = ([], [])
    for k, name in enumerate(found.classes):
        of_class = [spec for spec in labelled if found.label[spec.slide_id] == k]
        share = max(2, most // len(found.classes) // len(of_class))
        before = len(sides[0]), len(sides[1])
        for spec in of_class:
            with spec.open() as slide:
                for side, tile in _tiles(slide, px, share):
                    sides[side].append((tile, k))
        if any(len(side) == count for side, count in zip(sides, before, strict=True)):
            raise ValueError(
                f"--slides {root}: slides of class {name!r} have no tiles of {px} px of tissue on both sides"
            )
    source = f"{len(sides[0])} + {len(sides[1])} tiles of {len(labelled)} slides"
    return _stacked(*sides, found.classes, source)


def made_pictures(px: int, most: int) -> Pictures:
    """Two classes of noise, one brighter: where nothing can be read, to time the same work."""
    draw = torch.Generator().manual_seed(0)
    labels = torch.arange(most) % 2
    noise = torch.randint(0, 192, (most, 3, px, px), generator=draw, dtype=torch.uint8)
    images = noise + (labels * 63).to(torch.uint8)[:, None, None, None]
    train = most - round(VALIDATION * most)
    return Pictures(
        images[:train], labels[:train], images[train:], labels[train:], ("dark", "bright"), f"{most} made pictures"
    )


def _files(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if path.suffix.lower() in SUFFIXES)


def _even(items: Sequence[Path], count: int | None) -> list[Path]:
    """``count`` of the items, evenly over their order."""
    if count is None or count >= len(items):
        return list(items)
    return [items[k * len(items) // count] for k in range(count)]


def _parted(items: Sequence[Path]) -> tuple[list[Path], list[Path]]:
    """Every few of them validates."""
    val = {int(k / VALIDATION) for k in range(max(1, round(VALIDATION * len(items))))}
    return [p for k, p in enumerate(items) if k not in val], [p for k, p in enumerate(items) if k in val]


def _read(path: Path, px: int) -> Tensor:
    """The middle of a picture: uint8 (3, px, px)."""
    with Image.open(path, formats=FORMATS) as opened:
        picture = opened.convert("RGB")
    scale = MARGIN * px / min(picture.size)
    width, height = (max(px, round(scale * side)) for side in picture.size)
    picture = picture.resize((width, height), Image.Resampling.BILINEAR)
    left, top = (width - px) // 2, (height - px) // 2
    return _planes(np.asarray(picture.crop((left, top, left + px, top + px))))


def _planes(pixels: np.ndarray[tuple[int, ...], np.dtype[np.uint8]]) -> Tensor:
    return torch.from_numpy(pixels.copy()).permute(2, 0, 1).contiguous()


def _tiles(slide: Slide, px: int, most: int) -> Iterator[tuple[int, Tensor]]:
    """(0 train or 1 validate, uint8 (3, px, px)) of ``most`` tiles of a slide."""
    from pipelines.slides.geometry import Region
    from pipelines.tiles.tiling import tile_grid, tissue_fractions
    from pipelines.tiles.tissue import find_tissue, read_overview

    grid = tile_grid(slide.levels, slide.bounds, px, slide.mpp, px)
    fractions = tissue_fractions(find_tissue(read_overview(slide, 8.0, 1)), grid)
    # The last column and row overlap the one before.
    rows, columns = np.nonzero(fractions[:-1, :-1] >= TISSUE)
    bound = round((1 - VALIDATION) * (len(grid.l0_x) - 1))
    drawn = np.random.default_rng(0).permutation(len(rows))
    sides = drawn[columns[drawn] < bound], drawn[columns[drawn] >= bound]
    for side, share in enumerate((1 - VALIDATION, VALIDATION)):
        for pick in sides[side][: max(1, round(share * most))]:
            l0_x, l0_y = int(grid.l0_x[columns[pick]]), int(grid.l0_y[rows[pick]])
            yield side, _planes(slide.read(Region(l0_x, l0_y, px, px, slide.mpp)))


def _stacked(
    train: Sequence[tuple[Tensor, int]], val: Sequence[tuple[Tensor, int]], classes: Sequence[str], source: str
) -> Pictures:
    images, labels = (
        [torch.stack([x for x, _ in side]) for side in (train, val)],
        [torch.tensor([k for _, k in side]) for side in (train, val)],
    )
    return Pictures(images[0], labels[0], images[1], labels[1], tuple(classes), source)
