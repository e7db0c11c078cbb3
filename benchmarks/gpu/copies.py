"""Copies between device and host: bytes per second by kind of memory, direction and size, next to the link's peak.

Takes nothing; gives a row per kind of host memory, direction and size. Both directions at once are two threads, each
with a stream of its own. On a CPU, copies within its memory, which say nothing about a link.
"""

from __future__ import annotations

import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from benchmarks.gpu.setting import MIB, Row, Setting, attempt

LANE = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}
"""Bytes per second of a lane in one direction by generation of PCIe, coding taken off (PCI-SIG)."""
ROUNDS, LEAST_S = 5, 0.05
WAYS = ("out", "back", "both")
HEADER = ("host memory", "size, MiB", "to the host, GB/s", "back", "both at once, sum", "of the link's peak")


def rows(setting: Setting) -> Iterator[Row]:
    peak = link_peak() if setting.full else None
    sizes = [size * MIB for size in setting.of((1, 16, 256), (1, 4))]
    for pinned in (True, False) if setting.full else (False,):
        for size in sizes:
            what: Row = {"memory": "pinned" if pinned else "pageable", "bytes": size, "peak_bytes_per_s": peak}

            def run(pinned: bool = pinned, size: int = size) -> Row:
                return {f"{way}_bytes_per_s": rate(setting, way, size, pinned=pinned) for way in WAYS}

            yield attempt(what, run)


def rate(setting: Setting, way: str, size: int, *, pinned: bool) -> float:
    """Bytes per second, summed over the directions; the median of ``ROUNDS``.

    Args:
        way: out, back or both.
        size: bytes of a copy.
    """
    directions = ("out", "back") if way == "both" else (way,)
    copies = [_copier(setting, direction, size, pinned=pinned) for direction in directions]
    once = _seconds(copies, 1)
    count = max(1, round(LEAST_S / max(once, 1e-6)) if setting.full else 1)
    return statistics.median(len(copies) * count * size / _seconds(copies, count) for _ in range(ROUNDS))


def _seconds(copies: list[Callable[[int], None]], count: int) -> float:
    began = time.perf_counter()
    with ThreadPoolExecutor(len(copies)) as pool:
        list(pool.map(lambda copy: copy(count), copies))
    return time.perf_counter() - began


def _copier(setting: Setting, direction: str, size: int, *, pinned: bool) -> Callable[[int], None]:
    """Return a function that copies a number of times and waits for the copies."""
    host = torch.zeros(size, dtype=torch.uint8, pin_memory=pinned)
    device = torch.zeros(size, dtype=torch.uint8, device=setting.device)
    source, target = (device, host) if direction == "out" else (host, device)
    if not setting.full:
        return lambda count: _copy(source, target, count)
    stream = torch.cuda.Stream(setting.device)

    def copy(count: int) -> None:
        with torch.cuda.stream(stream):
            _copy(source, target, count)
        stream.synchronize()

    setting.settle()
    return copy


def _copy(source: Tensor, target: Tensor, count: int) -> None:
    for _ in range(count):
        target.copy_(source, non_blocking=True)


def link_peak() -> float | None:
    """Bytes per second of the first GPU's link in one direction, as its driver describes it; None where it does not."""
    asked = "pcie.link.gen.max,pcie.link.width.max"
    command = ["nvidia-smi", f"--query-gpu={asked}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
        generation, width = (int(word) for word in done.stdout.splitlines()[0].split(","))
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None
    return LANE[generation] * width if generation in LANE else None


def line(row: Row) -> tuple[str, ...]:
    rates = [row[f"{way}_bytes_per_s"] for way in WAYS]
    peak = row["peak_bytes_per_s"]
    share = "not known" if peak is None else f"{max(rates[:2]) / peak:.0%}"
    return row["memory"], str(row["bytes"] // MIB), *(f"{each / 1e9:.1f}" for each in rates), share
