"""Measurements of this machine: kept in the user's cache, and repeated once other programs have left its cores.

By default glibc returns blocks of 32 MiB and more, and a long free end of the heap, to the kernel. The kernel zeroes
them page by page when they are allocated again: layers that only move bytes wait for it several times longer than for
memory. ``keep_freed_memory`` ends that; see mallopt(3).
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import hashlib
import json
import logging
import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, TypeVar

import psutil

INDUCTOR = "TORCHINDUCTOR_CACHE_DIR"

BUSY = 0.1
"""Share of the cores' time that other programs take; an idle desktop stays below."""
LOOK_S = 0.5

log = logging.getLogger(__name__)


class Measured(Protocol):
    """Measurement that tells the share of the cores' time that other programs took meanwhile."""

    @property
    def others(self) -> float: ...


T = TypeVar("T", bound=Measured)


def load_or_measure(
    key: dict[str, Any],
    name: str,
    what: str,
    measure: Callable[[], T],
    parse: Callable[[str], T | None],
    to_text: Callable[[T], str],
) -> T:
    """Return the measurement kept of an earlier time, else what ``measure`` gives, which is kept.

    One that was made on a busy machine is used only as long as that is busy.

    Args:
        key, name: as for ``kept_at``.
        what: is measured, for warnings.
        parse: returns what ``to_text`` took; None where it no longer holds.
    """
    path = kept_at(key, name)
    text = kept_text(path)
    kept = parse(text) if text else None
    if kept is not None:
        if kept.others <= BUSY:
            return kept
        then = 100 * kept.others
        if (now := 100 * others_now()) > 100 * BUSY:
            log.warning(
                "other programs took %.0f %% of the cores while %s were measured, and take %.0f %% now: real times may "
                "be shorter; measured again once this machine is calm",
                *(then, what, now),
            )
            return kept
        log.warning("measuring %s again: other programs took %.0f %% of the cores then, and are gone", what, then)
    made = measure()
    if made.others > BUSY:
        log.warning(
            "other programs took %.0f %% of the cores while %s were measured: real times may be shorter; measured "
            "again once this machine is calm",
            *(100 * made.others, what),
        )
    keep(path, to_text(made))
    return made


def kept_at(key: dict[str, Any], what: str = "costs") -> Path | None:
    """Return the file of the measurement, whether there is one or not; None for a user without a home.

    Args:
        key: all that the measurement holds for.
        what: was measured; first part of the file's name.
    """
    folder = _folder()
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    return folder / f"{what}-{digest[:16]}.json" if folder else None


def own_torch_cache() -> None:
    """Let torch keep what it compiles in this user's cache, for this process and those it starts.

    By default torch makes a folder in the temporary folder of all users, under a name that is easy to guess, and runs
    the code that it finds there. What the user has set stays. Without a cache it is a temporary folder.
    """
    if INDUCTOR in os.environ:
        return
    try:
        folder = (_folder() or Path(os.devnull)) / "torchinductor"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
        os.environ[INDUCTOR] = str(folder)
    except OSError:
        os.environ[INDUCTOR] = tempfile.mkdtemp(prefix="megatile-torch-")
        atexit.register(shutil.rmtree, os.environ[INDUCTOR], ignore_errors=True)


def _folder() -> Path | None:
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "megatile"
    except RuntimeError:  # neither HOME nor an entry in the list of users, as in many a container
        return None


def kept_text(path: Path | None) -> str | None:
    """Return the text kept at ``path``, of ``kept_at``; None where there is none, or, with a warning, it is damaged."""
    if path is None:
        return None
    try:
        text, _, digest = path.read_bytes().rpartition(b"\n")
    except OSError:
        return None
    if hashlib.sha256(text).hexdigest().encode() != digest:
        log.warning("%s is damaged, or of an earlier version: measured anew", path)
        return None
    return text.decode()


def keep(path: Path | None, text: str) -> None:
    """Write ``text`` to ``path``, of ``kept_at``, and its digest; where that cannot be done, say so once."""
    if path is None:
        _tell("this user has no home folder")
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:  # ranks of one machine may come here at once
            file = Path(folder) / path.name
            file.write_text(f"{text}\n{hashlib.sha256(text.encode()).hexdigest()}")
            os.replace(file, path)
    except OSError as fault:
        _tell(f"{path.parent} cannot be written ({fault.strerror})")


@functools.cache
def _tell(reason: str) -> None:
    log.warning(
        "%s: what was measured of this machine is used now and not kept; XDG_CACHE_HOME names another folder", reason
    )


class CoreUse:
    """The work on the cores since this was made: of other programs, and of this process and those it has waited for.

    Works where Linux says what each core has done; what a virtual machine's host took counts as others' too.
    """

    def __init__(self) -> None:
        self._cores = sorted(os.sched_getaffinity(0))
        self._begin = self._read()

    def others(self) -> float:
        """Return the share of the cores' time that others have taken so far, 0 to 1."""
        passed_s, busy_s, own_s = (now - then for now, then in zip(self._read(), self._begin, strict=True))
        return min(1.0, max(0.0, (busy_s - own_s) / (passed_s * len(self._cores))))

    def _read(self) -> tuple[float, float, float]:
        """Return seconds: of the clock, of work on the cores, of this process and what it has waited for."""
        machine = psutil.cpu_times(percpu=True)
        cores = [machine[core] for core in self._cores if core < len(machine)]
        busy_s = sum(core.user + core.nice + core.system + core.irq + core.softirq + core.steal for core in cores)
        own = os.times()
        return time.monotonic(), busy_s, own.user + own.system + own.children_user + own.children_system


def cpu_model() -> str:
    """Return the name of the processor, as the kernel tells it."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() in ("model name", "Model", "Hardware"):
                return value.strip()
    return platform.processor() or platform.machine()


def others_now() -> float:
    """Return the share that others take at present; takes half a second."""
    use = CoreUse()
    time.sleep(LOOK_S)
    return use.others()


M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
"""Of malloc.h."""


def keep_freed_memory() -> bool:
    """Let this process keep what it frees for its next allocations; return whether the C library can (glibc)."""
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(M_MMAP_MAX, 0)) and bool(mallopt(M_TRIM_THRESHOLD, -1))
