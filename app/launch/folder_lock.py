"""A lock on a folder: one command writes into it at a time, and the second is refused with the name of the first.

Takes a folder; holds the kernel's lock on a file in it, which ends with the process however that ends. Where the file
system has no locks, the name that stands in the file decides.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import getpass
import json
import os
import platform
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

from app.launch.restart import find_launcher
from app.settings.cli import RunError

LOCK = "run.lock"

PATIENCE_S = 5.0
"""How long a lock is waited for: a process that was killed lets go once its memory is given back."""
RESTART_PATIENCE_S = 60.0
"""The same, where the holder was started by what started this process: that ends it before it starts another."""
NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL)
"""What a file system without locks answers."""

_held: set[int] = set()
"""Descriptors of this process's locks."""


@dataclass(frozen=True, slots=True)
class Holder:
    """The process that has a lock; ``agent`` and ``job`` as of ``Launcher``."""

    host: str
    pid: int
    user: str
    since: str
    command: str
    agent: str | None
    job: str | None

    @classmethod
    def here(cls) -> Holder:
        """Return this process as a holder."""
        starter = find_launcher()
        since = datetime.now().astimezone().isoformat(" ", "seconds")
        command = Path(sys.argv[0]).stem if len(sys.argv[0]) > 2 else "python"
        return cls(platform.node(), os.getpid(), _user(), since, command, starter.agent, starter.job)

    def __str__(self) -> str:
        return f"{self.user} on {self.host}, process {self.pid} ({self.command}), since {self.since}"

    def is_restart_of(self, other: Holder) -> bool:
        """Return whether one launcher or job started both: it ends one before it starts the other."""
        return (self.agent is not None and self.agent == other.agent) or (
            self.job is not None and self.job == other.job
        )


@contextlib.contextmanager
def lock_folder(folder: Path, name: str = LOCK, *, shared: bool = False) -> Iterator[None]:
    """Hold the lock of ``folder``, which is made when it is not there, and removed after an error if it is empty.

    Args:
        name: of the lock's file.
        shared: with others that share it; excludes those that do not.

    Raises:
        RunError: somebody else holds it (named), or the folder cannot be written.
    """
    path, is_new = folder / name, not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as fault:
        raise RunError(f"run folder {folder} cannot be written ({fault.strerror}); name another with --out") from fault
    here = Holder.here()
    _held.add(descriptor)
    try:
        _acquire(path, descriptor, here, shared)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(asdict(here)).encode(), 0)
        try:
            yield
        except BaseException:
            if is_new and not shared and [entry.name for entry in folder.iterdir()] == [name]:
                path.unlink()
                folder.rmdir()
            raise
        finally:
            if _read(descriptor) == here:
                os.ftruncate(descriptor, 0)
    finally:
        _held.discard(descriptor)
        os.close(descriptor)


def _acquire(path: Path, descriptor: int, here: Holder, shared: bool) -> None:
    begun_s = time.monotonic()
    while True:
        holder = _read(descriptor)
        try:
            return fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            is_restart = holder is not None and here.is_restart_of(holder)
            if time.monotonic() - begun_s > (RESTART_PATIENCE_S if is_restart else PATIENCE_S):
                raise _in_use(path, holder) from None
            time.sleep(0.1)
        except OSError as fault:
            if fault.errno not in NO_LOCKS:
                raise
            if shared or holder is None or _has_ended(holder, here):
                return None
            raise RunError(f"{_in_use(path, holder)}. If it is gone, remove {path}: this disk has no locks") from None


def _has_ended(holder: Holder, here: Holder) -> bool:
    """Return whether what started both has ended ``holder`` before: of a job of Slurm, only a requeue is proof."""
    starter = find_launcher()
    return (here.agent is not None and here.agent == holder.agent) or (starter.requeued and starter.job == holder.job)


def _in_use(path: Path, holder: Holder | None) -> RunError:
    who = holder or "a process that has not said who it is"
    return RunError(
        f"{path.parent} is in use by {who}: two at once would mix their results. Wait for its end or stop it, or name "
        "another folder with --out"
    )


def _read(descriptor: int) -> Holder | None:
    """Return who the file says has the lock; None after it let go, and for what is no such file."""
    with contextlib.suppress(ValueError, TypeError):
        return Holder(**json.loads(os.pread(descriptor, 1 << 16, 0)))
    return None


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError, ImportError):  # an account without a name, as containers have
        return f"user {os.getuid()}"


def _close_all() -> None:
    """Close the locks in a child: what it inherits would hold them beyond the life of its parent."""
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_close_all)
