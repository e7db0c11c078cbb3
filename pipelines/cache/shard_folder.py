"""A folder of shards that several processes write into: each shard by one of them, whole, or not at all.

Two Zarr arrays under one group: ``tiles``, and ``places``, which says what each tile is. A process claims a number by
making ``tiles/.K.writing``, which only one can; the file is renamed when it is whole, and the places follow, so that a
reader finds no tile that is not there. What a killed process leaves is removed an hour later.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from pipelines.backends.tile_shard import checked, places_metadata, tiles_metadata, with_checksum
from pipelines.cache.tile_kind import PLACE_NUMBERS, Place, TileKind

MOST_SHARDS = 1 << 20
"""As many the arrays have room for."""

WRITING = ".writing"

ABANDONED_S = 3600.0
"""A shard that was begun so long ago and is not whole has no writer any more."""


class ShardFolder:
    """The shards of one kind of tiles.

    Args:
        cache: the folder of the cache, which may hold other kinds.
        kind: of the tiles.

    Raises:
        OSError: the folder cannot be made or written.
    """

    def __init__(self, cache: Path, kind: TileKind) -> None:
        self.cache, self.kind = cache, kind
        self.path = cache / kind.name
        self._whole: dict[str, int] = {}  # files that will not change, and their bytes
        self._tiles, self._places = self.path / "tiles", self.path / "places"
        for folder in (self._tiles, self._places):
            folder.mkdir(parents=True, exist_ok=True)
        group = {"zarr_format": 3, "node_type": "group", "attributes": {"megatile": kind.about}}
        slots = kind.slots
        _write_json(self.path, group)
        _write_json(self._tiles, tiles_metadata(MOST_SHARDS, slots, kind.height, kind.width))
        _write_json(self._places, places_metadata(MOST_SHARDS, slots, PLACE_NUMBERS))
        self._remove_abandoned()

    def shards(self) -> list[int]:
        """Return the numbers of the shards that are whole, in order."""
        return sorted(number for name in os.listdir(self._places) if (number := _number(name, "c.", ".0")) is not None)

    def tiles_of(self, shard: int) -> Path:
        """Return the file with the tiles of ``shard``."""
        return self._tiles / f"c.{shard}.0.0.0"

    def places_of(self, shard: int) -> NDArray[np.int64]:
        """Return the places of the tiles of ``shard``, int64 (slots, 4).

        Raises:
            OSError, DamagedShard: they cannot be read.
        """
        data = checked((self._places / f"c.{shard}.0").read_bytes())
        return np.frombuffer(data, "<i8").reshape(self.kind.slots, -1)

    def publish(self, parts: Sequence[bytes], places: Sequence[Place], most_bytes: int) -> int | None:
        """Write a shard, and return its number; None if the cache would become larger than ``most_bytes``.

        Args:
            parts: of the file, one after the other.
            places: of its tiles.

        Raises:
            OSError: the disk is full, or the folder is gone.
        """
        listed = np.zeros((self.kind.slots, PLACE_NUMBERS), "<i8")
        listed[: len(places)] = places
        list_bytes = with_checksum(listed.tobytes())
        shard, file = self._claim()
        with file:
            path = Path(file.name)
            try:
                # Takes its share of the budget before it looks what the others have: of two, one at least sees both.
                os.ftruncate(file.fileno(), sum(len(part) for part in parts))
                if self._held_bytes() + len(list_bytes) > most_bytes:
                    return None
                for part in parts:
                    file.write(part)
                file.flush()
                if not os.path.samestat(path.stat(), os.fstat(file.fileno())):
                    raise OSError(f"{path}: another process took this process for dead")
                path.replace(self.tiles_of(shard))
            finally:
                path.unlink(missing_ok=True)
        list_file = self._places / f".{shard}{WRITING}"
        list_file.write_bytes(list_bytes)
        list_file.replace(self._places / f"c.{shard}.0")
        return shard

    def _claim(self) -> tuple[int, BinaryIO]:
        """Return a number that no other process has, and the file that claims it, open to be written."""
        taken = {n for name in os.listdir(self._tiles) if (n := _number(name, "c.", ".0.0.0")) is not None}
        shard = max(taken, default=-1) + 1
        while True:
            with contextlib.suppress(FileExistsError):
                file = (self._tiles / f".{shard}{WRITING}").open("xb")
                if not self.tiles_of(shard).exists():  # it may have become whole since the folder was listed
                    return shard, file
                file.close()
                Path(file.name).unlink()
            shard += 1

    def _held_bytes(self) -> int:
        """Bytes of all shards in the cache, of whatever kind, those being written included."""
        held = 0
        for folder in self.cache.glob("tiles-*/*/"):
            with os.scandir(folder) as entries:
                for entry in entries:
                    with contextlib.suppress(FileNotFoundError):
                        held += self._whole.get(entry.path) or entry.stat().st_size
                        if entry.name.startswith("c.") and entry.path not in self._whole:
                            self._whole[entry.path] = entry.stat().st_size
        return held

    def _remove_abandoned(self) -> None:
        """Remove what processes left that were killed while they wrote."""
        begun = time.time() - ABANDONED_S
        listed = set(self.shards())
        for file in (*self._tiles.iterdir(), *self._places.iterdir()):
            shard = _number(file.name, "c.", ".0.0.0")
            unlisted = shard is not None and shard not in listed
            with contextlib.suppress(FileNotFoundError):  # another process was first
                if (unlisted or file.name.endswith(WRITING)) and file.stat().st_mtime < begun:
                    file.unlink()


def _number(name: str, before: str, after: str) -> int | None:
    digits = name.removeprefix(before).removesuffix(after)
    return int(digits) if name == f"{before}{digits}{after}" and digits.isdecimal() else None


def _write_json(folder: Path, value: dict[str, Any]) -> None:
    text = json.dumps(value, indent=2) + "\n"
    path = folder / "zarr.json"
    if not path.exists() or path.read_text() != text:
        temporary = folder / f".zarr.{os.getpid()}.json"
        temporary.write_text(text)
        os.replace(temporary, path)
