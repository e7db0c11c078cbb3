"""A lock on a folder: one command writes into it at a time, and whoever comes second is told who was first.

Takes a folder; holds a lock in it for as long as the process lives. The kernel lets go of it when the process ends,
however it ends, so that a lock is never stale on one host. Where that says nothing (the holder was on another host, or
the file system knows no locks) the holder's sign of life decides: the time of the lock's file, renewed all the while.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import getpass
import json
import logging
import os
import platform
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

from app.launch.restart import find_starter
from app.settings.cli import RunError

log = logging.getLogger(__name__)

LOCK = "run.lock"

BEAT_S = 10.0
"""Seconds between two signs of life; a holder without any for three and a half times as long is gone."""
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
    """The process that has a lock; ``agent`` and ``job`` as of ``Starter``."""

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
        starter = find_starter()
        since = datetime.now().astimezone().isoformat(" ", "seconds")
        command = Path(sys.argv[0]).stem if len(sys.argv[0]) > 2 else "python"
        return cls(platform.node(), os.getpid(), _user(), since, command, starter.agent, starter.job)

    def __str__(self) -> str:
        return f"{self.user} on {self.host}, process {self.pid} ({self.command}), since {self.since}"

    def starts_again_as(self, other: Holder) -> bool:
        """Return whether what started both ends one before it starts the other."""
        return (self.agent is not None and self.agent == other.agent) or (
            self.job is not None and self.job == other.job
        )


@contextlib.contextmanager
def sole_user(folder: Path, name: str = LOCK, *, shared: bool = False) -> Iterator[None]:
    """Hold the lock of ``folder``, which is made when it is not there.

    Args:
        name: of the lock's file.
        shared: beside others that say the same; who does not is kept out, and keeps them out.

    Raises:
        RunError: somebody else holds it (named), or the folder cannot be written.
    """
    path = folder / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as fault:
        raise RunError(f"run folder {folder} cannot be written ({fault.strerror}); name another with --out") from fault
    us, ended = Holder.here(), threading.Event()
    _held.add(descriptor)
    try:
        _acquire(path, descriptor, us, shared)
        beating = threading.Thread(target=_beat, args=(descriptor, ended), name="folder-lock", daemon=True)
        beating.start()
        try:
            yield
        finally:
            ended.set()
            beating.join()
            if _read(descriptor) == us:
                os.ftruncate(descriptor, 0)
    finally:
        _held.discard(descriptor)
        os.close(descriptor)


def _acquire(path: Path, descriptor: int, us: Holder, shared: bool) -> None:
    begun_s = time.monotonic()
    while True:
        holder = _read(descriptor)
        try:
            fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
            has_locks = True
            break
        except BlockingIOError:
            patience_s = RESTART_PATIENCE_S if holder is not None and holder.starts_again_as(us) else PATIENCE_S
            if time.monotonic() - begun_s > patience_s:
                raise _in_use(path, holder) from None
            time.sleep(0.1)
        except OSError as fault:
            if fault.errno not in NO_LOCKS:
                raise
            has_locks = False
            break
    holder = _read(descriptor)
    known_gone = holder is None or (has_locks and holder.host == us.host) or _ran_before(holder)
    if holder is not None and not known_gone and not shared:
        _await_silence(path, holder)
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, json.dumps(asdict(us)).encode(), 0)
    if not has_locks and not shared:
        time.sleep(1.0)  # of two that come at once, the one that wrote last stays
        if _read(descriptor) != us:
            raise _in_use(path, _read(descriptor))


def _ran_before(holder: Holder) -> bool:
    """Return whether it was this job of Slurm, which runs a job again once it has ended."""
    starter = find_starter()
    return starter.requeued and starter.job == holder.job


def _await_silence(path: Path, holder: Holder) -> None:
    """Return once ``holder``, who did not let go, has shown no sign of life for long enough.

    Raises:
        RunError: it has.
    """
    quiet_s = 3.5 * BEAT_S
    log.warning("%s was in use by %s: waiting %.0f s for a sign of life", path.parent, holder, quiet_s)
    last, begun_s = _renewed_ns(path), time.monotonic()
    while time.monotonic() - begun_s < quiet_s:
        time.sleep(BEAT_S / 4)
        if _renewed_ns(path) != last:
            raise _in_use(path, holder)
    log.warning("%s is taken over: its user gave no sign of life", path.parent)


def _renewed_ns(path: Path) -> int:
    with path.open("rb") as file:  # opened anew: a network file system asks its server then
        return os.fstat(file.fileno()).st_mtime_ns


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


def _beat(descriptor: int, ended: threading.Event) -> None:
    while not ended.wait(BEAT_S):
        with contextlib.suppress(OSError):
            os.utime(descriptor)


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
