"""Where the files of a Zarr slide lie: what is asked of a store before the Zarr library sees it.

Takes the path of a slide, gives a ``ZarrStore``: a folder, or a server that a file with a URL names. A key is a path
below the root, with slashes.
"""

from __future__ import annotations

import stat
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Any, Final, Protocol

import zarr.storage

from pipelines.slides.slide import NotThisFormat
from pipelines.slides.slide_url import is_url_name

NO_FILE: Final = -1
"""In place of a size: something else than a file lies there."""

JSON_BYTES: Final = 16 << 20
"""Metadata have at most."""

_MEMBERS_NAMED: Final = 8


class ZarrStore(Protocol):
    """The files of one slide. Its text is what an error calls it by."""

    most_bytes: int
    """What is received of one file at most: metadata, then a chunk of the slide as well."""

    @property
    def files(self) -> Any:
        """The store as the Zarr library takes it."""

    def sizes(self, keys: Sequence[str]) -> list[int | None]:
        """Bytes of each file; None where there is none, ``NO_FILE`` where something else is."""
        ...

    def read(self, key: str) -> bytes:
        """All bytes of a file that is there."""
        ...

    def members(self) -> str:
        """What lies in the root, for a message."""
        ...

    def close(self) -> None: ...


class ZarrFolder:
    """A folder on a disk."""

    def __init__(self, root: Path) -> None:
        self._root, self.most_bytes = root, JSON_BYTES
        self.files = zarr.storage.LocalStore(root, read_only=True)

    def __str__(self) -> str:
        return str(self._root)

    def sizes(self, keys: Sequence[str]) -> list[int | None]:
        return [self._size(key) for key in keys]

    def _size(self, key: str) -> int | None:
        try:
            status = (self._root / key).stat()
        except (FileNotFoundError, NotADirectoryError):
            return None
        return status.st_size if stat.S_ISREG(status.st_mode) else NO_FILE

    def read(self, key: str) -> bytes:
        return (self._root / key).read_bytes()

    def members(self) -> str:
        return ", ".join(sorted(child.name for child in self._root.iterdir() if child.is_dir())[:_MEMBERS_NAMED])

    def close(self) -> None:
        """Nothing is held open."""


def open_store(path: Path) -> ZarrStore:
    """Return the store of the slide at ``path``, which the caller closes.

    Raises:
        NotThisFormat: neither a folder nor a file with a URL.
        SlideError: no usable URL, or what reads it is not installed.
    """
    if path.is_dir():
        return ZarrFolder(path)
    if not is_url_name(path.name):
        raise NotThisFormat(f"{path}: not a folder")
    from pipelines.backends.remote_zarr import RemoteFolder  # fsspec is loaded for slides behind a URL alone

    return RemoteFolder(path)


def key_of(path: str, name: str) -> str:
    """Return the key of a file in the group or array at ``path``.

    >>> key_of("", ".zattrs"), key_of("0/", "zarr.json")
    ('.zattrs', '0/zarr.json')
    """
    return str(PurePosixPath(path, name))


def holds(store: ZarrStore, *keys: str) -> list[bool]:
    """Return which of the keys are files."""
    return [size is not None and size != NO_FILE for size in store.sizes(keys)]
