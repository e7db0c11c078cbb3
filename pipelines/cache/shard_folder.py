"""A folder of shards that several processes write into: each shard by one of them, whole, or not at all.

Two Zarr arrays under one group: ``tiles``, and ``places``, which says what each tile is. A process claims a number by
making ``tiles/.K.writing``, which only one can; the file is renamed when it is whole, and the places follow, so that a
reader finds no tile that is not there. What a killed process leaves is removed an hour later.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from pipelines.backends.tile_shard import checked, places_metadata, tiles_metadata, with_checksum
from pipelines.cache.tile_kind import PLACE_NUMBERS, CacheSpec, Place
from pipelines.slides.whole_files import write_text

MOST_SHARDS = 1 << 20
"""As many the arrays have room for."""

WRITING = ".writing"

LEDGER = ".bytes"
"""File in the folder of the cache: bytes of all its shards."""

ABANDONED_S = 3600.0
"""A shard that was begun so long ago and is not whole has no writer any more."""


class ShardFolder:
    """The shards of one kind of tiles.

    Raises:
        OSError: the folder cannot be made or written.
    """

    def __init__(self, cache: Path, kind: CacheSpec) -> None:
        self.cache, self.kind = cache, kind
        self.path = cache / kind.name
        self._tiles, self._places = self.path / "tiles", self.path / "places"
        for folder in (self._tiles, self._places):
            folder.mkdir(parents=True, exist_ok=True)
        group = {"zarr_format": 3, "node_type": "group", "attributes": {"megatile": kind.about}}
        slots = kind.slots
        _write_json(self.path, group)
        _write_json(self._tiles, tiles_metadata(MOST_SHARDS, slots, kind.height, kind.width))
        _write_json(self._places, places_metadata(MOST_SHARDS, slots, PLACE_NUMBERS))
        self._remove_abandoned()
        numbers = (_number(name, "c.", ".0.0.0") for name in os.listdir(self._tiles))
        self._next = 1 + max((number for number in numbers if number is not None), default=-1)  # to be claimed
        with self._ledger() as ledger:
            _write_held(ledger, self._held_bytes())

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
                if not self._reserve(file, sum(len(part) for part in parts), len(list_bytes), most_bytes):
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
        while True:
            shard, self._next = self._next, self._next + 1  # what is below was claimed: no folder is listed
            if self.tiles_of(shard).exists():
                continue
            with contextlib.suppress(FileExistsError):
                file = (self._tiles / f".{shard}{WRITING}").open("xb")
                if not self.tiles_of(shard).exists():  # it may have become whole since
                    return shard, file
                file.close()
                Path(file.name).unlink()

    def _reserve(self, file: BinaryIO, tile_bytes: int, list_bytes: int, most_bytes: int) -> bool:
        """Make ``file`` as large as it will be, if the cache stays within ``most_bytes``.

        The ledger has the bytes of all processes, so that no folder is listed for each shard. Where it says that there
        is no room, the files are counted: some may have been deleted.
        """
        with self._ledger() as ledger:
            held = _read_held(ledger)
            if held is None or held + tile_bytes + list_bytes > most_bytes:
                held = self._held_bytes()
            fits = held + tile_bytes + list_bytes <= most_bytes
            if fits:
                os.ftruncate(file.fileno(), tile_bytes)
                held += tile_bytes + list_bytes
            _write_held(ledger, held)
        return fits

    @contextlib.contextmanager
    def _ledger(self) -> Iterator[int]:
        """The file with the bytes that the cache holds, locked."""
        ledger = os.open(self.cache / LEDGER, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(ledger, fcntl.LOCK_EX)
            yield ledger
        finally:
            os.close(ledger)

    def _held_bytes(self) -> int:
        """Bytes of all shards in the cache, of whatever kind, those being written included."""
        held = 0
        for folder in self.cache.glob("tiles-*/*/"):
            with os.scandir(folder) as entries:
                for entry in entries:
                    with contextlib.suppress(FileNotFoundError):
                        held += entry.stat().st_size
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


def _read_held(ledger: int) -> int | None:
    """Bytes by the ledger; None if it was damaged."""
    text = os.pread(ledger, 32, 0)
    return int(text) if text.isdigit() else None


def _write_held(ledger: int, held: int) -> None:
    os.pwrite(ledger, b"%020d" % held, 0)
    os.truncate(ledger, 20)


def _number(name: str, before: str, after: str) -> int | None:
    digits = name.removeprefix(before).removesuffix(after)
    return int(digits) if name == f"{before}{digits}{after}" and digits.isdecimal() else None


def _write_json(folder: Path, value: dict[str, Any]) -> None:
    text = json.dumps(value, indent=2) + "\n"
    path = folder / "zarr.json"
    if not path.exists() or path.read_bytes() != text.encode():
        write_text(path, text)
