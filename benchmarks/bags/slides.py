"""Slides of which few tiles show the class: of noise with striped tiles, and of real tissue with tiles full of nuclei.

Gives a folder of PNG slides, ``labels.csv``, and of real tissue ``splits.csv``.
"""

from __future__ import annotations

import csv
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path

import cv2
import numpy as np
from numpy.typing import NDArray

SIDE, PX = 8, 32
"""Side of a slide in tiles, and of a tile in px."""

TILES = SIDE * SIDE
STRIPED, DENSE = 2, 2
"""Tiles of a positive slide that show its class, of 64."""

CUT_PX, STEP_PX, DENSE_SHARE, SPARSE_SHARE = 64, 16, 0.4, 0.2
"""Tissue is cut every 16 px into tiles of 64 px, which are shrunk to 32 px. Nuclei cover at least 40 % of a dense tile,
and at most 20 % of the others."""

Tiles = list[NDArray[np.uint8]]


def make_noise_slides(folder: Path, count: int, px: int = PX) -> None:
    """Write ``count`` slides of noise, every other with ``STRIPED`` striped tiles."""
    rng, names = np.random.default_rng(0), ("plain", "striped")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for number in range(count):
        pixels = rng.normal(170, 25, (SIDE * px, SIDE * px, 3))
        for place in rng.choice(TILES, STRIPED * (number % 2), replace=False):
            top, left = (int(k) * px for k in divmod(int(place), SIDE))
            pixels[top : top + px : 4, left : left + px] -= 60
        cv2.imwrite(str(folder / f"s{number:03d}.png"), pixels.clip(0, 255).astype(np.uint8))
    _write(folder / "labels.csv", ("slide", "label"), ((f"s{k:03d}", names[k % 2]) for k in range(count)))


def make_tissue_slides(folder: Path, count: int, images: Path, masks: Path, seed: int) -> None:
    """Write ``count`` slides of real tiles, every other with ``DENSE`` tiles full of nuclei.

    Half of the images, drawn by ``seed``, give the tiles of the training slides; the others give those of the held-out
    slides, so that no image is on both sides.

    Args:
        images: PNG files of stained tissue.
        masks: PNG files of the same names, 255 on nuclei.
    """
    rng, names = np.random.default_rng(seed), ("sparse", "dense")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    files = rng.permutation(np.array(sorted(path.name for path in images.glob("*.png"))))
    halves = [_tissue_tiles(images, masks, half.tolist()) for half in np.array_split(files, 2)]
    for number in range(count):
        sparse, dense = halves[number // 2 % 2]
        tiles = [sparse[k] for k in rng.choice(len(sparse), TILES)]
        for place in rng.choice(TILES, DENSE * (number % 2), replace=False):
            tiles[place] = dense[rng.integers(len(dense))]
        rows = [np.concatenate(tiles[k : k + SIDE], axis=1) for k in range(0, TILES, SIDE)]
        cv2.imwrite(str(folder / f"s{number:03d}.png"), np.concatenate(rows))
    _write(folder / "labels.csv", ("slide", "label"), ((f"s{k:03d}", names[k % 2]) for k in range(count)))
    splits = ((f"s{k:03d}", ("train", "val")[k // 2 % 2]) for k in range(count))
    _write(folder / "splits.csv", ("slide", "split"), splits)


def _tissue_tiles(images: Path, masks: Path, files: Sequence[str]) -> tuple[Tiles, Tiles]:
    """Return the tiles of ``files`` with few nuclei, and those with many."""
    sparse, dense, px = [], [], CUT_PX
    for name in files:
        pixels, mask = cv2.imread(str(images / name)), cv2.imread(str(masks / name))
        if pixels is None or mask is None:
            raise SystemExit(f"{name} cannot be read in {images} and {masks}")
        height, width = pixels.shape[:2]
        for y in range(0, height - px + 1, STEP_PX):
            for x in range(0, width - px + 1, STEP_PX):
                tile = cv2.resize(pixels[y : y + px, x : x + px], (PX, PX), interpolation=cv2.INTER_AREA)
                share = (mask[y : y + px, x : x + px, 0] > 0).mean()
                if share <= SPARSE_SHARE:
                    sparse.append(tile)
                elif share >= DENSE_SHARE:
                    dense.append(tile)
    if not sparse or not dense:
        raise SystemExit(f"{images}: {len(sparse)} tiles with few nuclei and {len(dense)} with many; give more images")
    return sparse, dense


def _write(path: Path, header: tuple[str, str], rows: Iterable[tuple[str, str]]) -> None:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([header, *rows])
