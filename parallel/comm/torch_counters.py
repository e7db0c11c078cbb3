"""Counters of ranks that found each other through a store of torch.distributed.

Takes the group's store; gives ``Counters``. A store at an address adds by itself. One in a file appends every addition
to it, and a run draws microbatches by the million: there the counters have a file of their own, beside it.
"""

from __future__ import annotations

import fcntl
import os
import struct
from pathlib import Path

from torch._C._distributed_c10d import Store

from parallel.comm.communicator import CommunicationError
from parallel.comm.counters import Counters
from parallel.comm.torch_store import PRIVATE_STORE

NUMBER = struct.Struct("<q")


class StoreCounters:
    """Kept by a store that listens at an address.

    Args:
        name: of the group, which no other group has.
        described: the rank, for errors.
    """

    def __init__(self, store: Store, name: str, described: str) -> None:
        self._store = store
        self._name = name
        self._described = described

    def add(self, counter: int, amount: int) -> int:
        try:
            return self._store.add(f"{self._name}/{counter}", amount)
        except RuntimeError as fault:  # what the store raises when who keeps it is gone or silent
            raise CommunicationError(
                f"{self._described}: drawing a microbatch failed: {str(fault).splitlines()[0]}; rank 0, which keeps "
                "the count, has ended or hangs: its own message says why"
            ) from fault

    def close(self) -> None:
        """The store ends with the run."""


class FileCounters:
    """In a file that all ranks of one machine have open, locked around each addition.

    Args:
        path: in a folder that only this user can enter.
        anew: made here, of zeros, in place of one that may be there; the other ranks open it then.
    """

    def __init__(self, path: Path, count: int, anew: bool) -> None:
        if anew:
            path.unlink(missing_ok=True)
        self._file = os.open(path, os.O_RDWR | (os.O_CREAT if anew else 0), 0o600)
        if anew:
            os.ftruncate(self._file, count * NUMBER.size)

    def add(self, counter: int, amount: int) -> int:
        place = counter * NUMBER.size
        fcntl.lockf(self._file, fcntl.LOCK_EX, NUMBER.size, place)
        try:
            number: int = NUMBER.unpack(os.pread(self._file, NUMBER.size, place))[0] + amount
            os.pwrite(self._file, NUMBER.pack(number), place)
            return number
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN, NUMBER.size, place)

    def close(self) -> None:
        os.close(self._file)


def torch_counters(store: Store, name: str, count: int, described: str, anew: bool) -> Counters:
    """Return ``count`` counters for the ranks that call this with the same ``store`` and ``name``: one of them with
    ``anew``, and the others after it."""
    if PRIVATE_STORE in os.environ:
        return FileCounters(Path(f"{os.environ[PRIVATE_STORE]}.{name}"), count, anew)
    return StoreCounters(store, name, described)
