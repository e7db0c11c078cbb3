"""One index per worker of each set of slides that the tests of ``app`` train on over and over.

The files of the first index are copied into later folders, where the run finds them as it finds those of ``app.index``.
Indexing itself is for ``tests/pipelines/tiles`` and ``tests/app/test_index.py``.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from app.training import dataset
from pipelines.catalog.catalog import SlideSpec
from pipelines.catalog.handles import SlideState
from pipelines.tiles.tile_table import TileTable
from pipelines.tiles.tiling import IndexSettings

FILE = "tiles.parquet"


@pytest.fixture(scope="session")
def kept_indexes(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[object, Path]]:
    """Folder of the copies, and slides and settings -> copy."""
    return tmp_path_factory.mktemp("indexes"), {}


@pytest.fixture(scope="module", autouse=True)
def indexed_once(kept_indexes: tuple[Path, dict[object, Path]]) -> Iterator[None]:
    """Before other fixtures of a module, which train, too."""
    folder, kept = kept_indexes
    build = dataset.build_index

    def build_once(specs: Sequence[SlideSpec], settings: IndexSettings, out: Path, **more: Any) -> TileTable:
        if (out / FILE).exists() or not all(type(spec) is SlideSpec and spec.path.is_file() for spec in specs):
            return build(specs, settings, out, **more)
        asked = settings, tuple((spec, SlideState.of(spec.path)) for spec in specs)
        if asked in kept:
            shutil.copytree(kept[asked], out, dirs_exist_ok=True)
        table = build(specs, settings, out, **more)
        if asked not in kept and not (out / "failed_slides.csv").exists():
            copy = folder / str(len(kept))
            copy.mkdir()
            shutil.copy(out / FILE, copy)
            shutil.copytree(out / "tissue", copy / "tissue")
            kept[asked] = copy
        return table

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dataset, "build_index", build_once)
        yield
