"""This host: cores and memory that the process may use, locks on folders, and the end of a process that hangs.

A Slurm job or a container is confined by control groups (Linux kernel, Documentation/admin-guide/cgroup-v2.rst): the
limit that holds is the least one of the process's group and of every group above it. One command writes into a folder
at a time; the kernel's lock on a file in it ends with the process.
"""

from __future__ import annotations

import contextlib
import fcntl
import getpass
import json
import math
import os
import platform
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

import psutil

from app.settings.cli import RunError
from app.settings.launcher import find_launcher
from parallel.comm.launch import PRIVATE_STORE, STARTED_BY_US
from pipelines.slides.whole_files import lock

TIMER = """
import os, select, signal, sys
if not select.select([0], [], [], float(sys.argv[1]))[0]:
    os.write(2, f"error: {sys.argv[3]}\\n".encode())
    os.kill(int(sys.argv[2]), signal.SIGKILL)
"""
"""Waits for the end of its input, which comes when the block is left or this process has ended."""
CHECK_S = 0.5
SAVE_S = 60.0
"""Time for the step under way and a checkpoint; then the rank is killed."""
CGROUPS = Path("/sys/fs/cgroup")
"""Where control groups are mounted."""
OWN_CGROUP = Path("/proc/self/cgroup")
"""Groups of this process, ``hierarchy:controllers:path`` lines."""
VMSTAT = Path("/proc/vmstat")
"""Counters of the kernel's memory, ``name number`` lines."""
NO_LIMIT_BYTES = 1 << 60
"""Version 1 of control groups writes a number near 2^63 where there is no limit."""
LOCK = "run.lock"
PATIENCE_S = 5.0
"""How long a lock is waited for: a process that was killed lets go once its memory is given back."""
RESTART_PATIENCE_S = 60.0
"""The same, where the holder was started by what started this process: that ends it before it starts another."""
_held: set[int] = set()
"""Descriptors of this process's locks."""


@contextlib.contextmanager
def kill_after(message: str, limit_s: float) -> Iterator[None]:
    """Give this process ``limit_s`` seconds to live within the block; past them, print ``message`` and kill it."""
    command = [sys.executable, "-I", "-S", "-c", TIMER, str(limit_s), str(os.getpid()), message]
    with subprocess.Popen(command, stdin=subprocess.PIPE):  # closes its input at the end
        yield


def stop_with_launcher() -> None:
    """Watch, on a thread, the process that forked this rank, which ends with the launcher; does nothing in a process
    that ``--ranks`` did not start."""
    server = int(os.environ.get(STARTED_BY_US, 0))
    is_child = os.getppid() == server
    if server and (is_child or not psutil.pid_exists(server)):
        threading.Thread(target=_stop_after, args=[server], name="launcher watch", daemon=True).start()


def _stop_after(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(CHECK_S)
    shutil.rmtree(Path(os.environ[PRIVATE_STORE]).parent, ignore_errors=True)
    os.write(2, b"warning: the process that started the ranks is gone: they end, after a checkpoint if they train\n")
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(SAVE_S)
    os.kill(os.getpid(), signal.SIGKILL)


def cgroup_limits() -> tuple[float | None, int | None, int | None]:
    """Return the cores, the bytes, and the bytes still free, that the control groups of this process allow, version 2
    or 1; None where there is no limit."""
    cores: list[float] = []
    memory: list[tuple[int, int]] = []
    for group in _groups():
        quota, _, period = _text(group / "cpu.max").partition(" ")
        if not quota:
            quota, period = _text(group / "cpu.cfs_quota_us"), _text(group / "cpu.cfs_period_us")
        if quota.isdigit() and period.isdigit() and int(period) > 0:  # not "max" and not -1
            cores.append(int(quota) / int(period))
        for limit_name, used_name, cached_name in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            limit, used = _text(group / limit_name), _text(group / used_name)
            if limit.isdigit() and int(limit) < NO_LIMIT_BYTES:
                # Pages of files that were read count as used, and are given up as soon as memory is wanted.
                cached = _count(group / "memory.stat", cached_name) or 0
                held = max(0, int(used) - cached) if used.isdigit() else 0
                memory.append((int(limit), int(limit) - held))
    least, free = min((size for size, _ in memory), default=None), min((left for _, left in memory), default=None)
    return min(cores, default=None), least, free


def memory_kills() -> int | None:
    """Return how many processes the kernel has killed for lack of memory so far: in this process's control group, else
    on the whole machine. None where neither is known."""
    files = (group / name for group in _groups() for name in ("memory.events", "memory.oom_control"))
    counts = (_count(path, "oom_kill") for path in (*files, VMSTAT))
    return next((count for count in counts if count is not None), None)


def _count(path: Path, name: str) -> int | None:
    """Return the number after ``name`` in a file of ``name number`` lines; None where there is none."""
    for line in _text(path).splitlines():
        found, _, count = line.partition(" ")
        if found == name and count.isdigit():
            return int(count)
    return None


def _groups() -> Iterator[Path]:
    """Yield the process's group folders and those above them, of every hierarchy."""
    for line in _text(OWN_CGROUP).splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        for mount in {CGROUPS} if not controllers else {CGROUPS / name for name in controllers.split(",")}:
            group = mount / path.strip("/")
            yield group
            yield from (above for above in group.parents if above == mount or mount in above.parents)


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def usable_cores() -> int:
    """Return the cores this process may run on: its affinity, and no more than its control groups' share, rounded
    up."""
    affinity, share = len(os.sched_getaffinity(0)), cgroup_limits()[0]
    return affinity if share is None else max(1, min(affinity, math.ceil(share)))


def memory_bytes() -> tuple[int, int]:
    """Return (all, still free) memory this process may use, in bytes."""
    machine = psutil.virtual_memory()
    total, free = int(machine.total), int(machine.available)
    _, limit, left = cgroup_limits()
    if limit is None or left is None or limit >= total:
        return total, free
    return limit, max(0, min(free, left))


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
    def of_this_process(cls) -> Holder:
        starter = find_launcher()
        since = datetime.now().astimezone().isoformat(" ", "seconds")
        command = Path(sys.argv[0]).stem if len(sys.argv[0]) > 2 else "python"
        return cls(platform.node(), os.getpid(), _user(), since, command, starter.agent, starter.job)

    def __str__(self) -> str:
        return f"{self.user} on {self.host}, process {self.pid} ({self.command}), since {self.since}"

    def is_restart_of(self, other: Holder) -> bool:
        """Return whether one launcher or job started both: it ends one before it starts the other."""
        pairs = (self.agent, other.agent), (self.job, other.job)
        return any(own is not None and own == theirs for own, theirs in pairs)


@contextlib.contextmanager
def lock_folder(folder: Path, name: str = LOCK, *, shared: bool = False) -> Iterator[None]:
    """Hold the lock of ``folder``, which is made when it is not there, and removed after an error if it is empty.

    Args:
        shared: with others that share it; excludes those that do not.

    Raises:
        RunError: another process holds it (named), or the folder cannot be written.
    """
    path, is_new = folder / name, not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as fault:
        raise RunError(f"run folder {folder} cannot be written ({fault.strerror}); name another with --out") from fault
    here = Holder.of_this_process()
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
            locked = lock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            is_restart = holder is not None and here.is_restart_of(holder)
            if time.monotonic() - begun_s > (RESTART_PATIENCE_S if is_restart else PATIENCE_S):
                raise _in_use(path, holder) from None
            time.sleep(0.1)
            continue
        # What started both ends one before it starts the other.
        if locked or shared or holder is None or find_launcher().has_started((holder.agent,), holder.job):
            return
        raise RunError(f"{_in_use(path, holder)}. If it is gone, remove {path}: this disk has no locks")


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
