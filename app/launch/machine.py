"""Cores and memory of the machine that this process may use, with a container's or a job's limits respected.

Takes nothing; returns numbers. A Slurm job or a container is confined by control groups (Linux kernel, Documentation/
admin-guide/cgroup-v2.rst): the limit that holds is the least one of the process's group and of every group above it.
"""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUP = Path("/proc/self/cgroup")
VMSTAT = Path("/proc/vmstat")

NO_LIMIT_BYTES = 1 << 60
"""Version 1 of control groups writes a number near 2^63 where there is no limit."""


@dataclass(frozen=True)
class CgroupLimits:
    """Limits of the control groups a process is in; None where there is none."""

    cores: float | None
    memory_bytes: int | None
    memory_used_bytes: int | None


def cgroup_limits(cgroups: Path = CGROUPS, own: Path = OWN_CGROUP) -> CgroupLimits:
    """Return the limits of this process's control groups, version 2 or 1.

    Args:
        cgroups: where they are mounted.
        own: the file that names the process's groups, ``hierarchy:controllers:path`` lines.
    """
    cores: list[float] = []
    memory: list[tuple[int, int | None]] = []
    for group in _groups(cgroups, own):
        quota, _, period = (_text(group / "cpu.max") or "").partition(" ")
        if not quota:
            quota, period = _text(group / "cpu.cfs_quota_us") or "", _text(group / "cpu.cfs_period_us") or ""
        if quota.isdigit() and period.isdigit() and int(period) > 0:  # not "max" and not -1
            cores.append(int(quota) / int(period))
        for limit_name, used_name in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            limit, used = _text(group / limit_name) or "", _text(group / used_name) or ""
            if limit.isdigit() and int(limit) < NO_LIMIT_BYTES:
                memory.append((int(limit), int(used) if used.isdigit() else None))
    least, used_of_least = min(memory, key=lambda entry: entry[0], default=(None, None))
    return CgroupLimits(min(cores, default=None), least, used_of_least)


def memory_kills(cgroups: Path = CGROUPS, own: Path = OWN_CGROUP, machine: Path = VMSTAT) -> int | None:
    """Return how many processes the kernel has killed for lack of memory so far: in this process's control group, else
    on the whole machine. None where neither is told.

    Args:
        cgroups, own: as for ``cgroup_limits``.
        machine: the kernel's counters of its memory, ``name number`` lines.
    """
    files = (group / name for group in _groups(cgroups, own) for name in ("memory.events", "memory.oom_control"))
    for path in (*files, machine):
        for line in (_text(path) or "").splitlines():
            name, _, count = line.partition(" ")
            if name == "oom_kill" and count.isdigit():
                return int(count)
    return None


def _groups(cgroups: Path, own: Path) -> Iterator[Path]:
    """Yield the process's group folders and those above them, of every hierarchy."""
    for line in (_text(own) or "").splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        for mount in {cgroups} if not controllers else {cgroups / name for name in controllers.split(",")}:
            group = mount / path.strip("/")
            yield group
            yield from (above for above in group.parents if above == mount or mount in above.parents)


def _text(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None


def usable_cores() -> int:
    """Return the cores this process may run on: its affinity, and no more than its control groups' share, rounded
    up."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    share = cgroup_limits().cores
    return affinity if share is None else max(1, min(affinity, math.ceil(share)))


def memory_bytes() -> tuple[int, int]:
    """Return (all, still free) memory this process may use, in bytes."""
    machine, limits = psutil.virtual_memory(), cgroup_limits()
    total, free = int(machine.total), int(machine.available)
    if limits.memory_bytes is None or limits.memory_bytes >= total:
        return total, free
    left = limits.memory_bytes - (limits.memory_used_bytes or 0)
    return limits.memory_bytes, max(0, min(free, left))


def cpu_model() -> str:
    """Return the name of the processor, as the kernel tells it."""
    for line in (_text(Path("/proc/cpuinfo")) or "").splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("model name", "Model", "Hardware"):
            return value.strip()
    return platform.processor() or platform.machine()
