"""The speed of copies between a device and the host, measured in a second and stored.

On a GPU copies go as offloading makes them. On a CPU they are copies in memory, made by one thread for each rank that
will compute, because the ranks share the memory.
"""

from __future__ import annotations

import json
import statistics
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields

import torch

from parallel.offload.copies import CudaCopies
from parallel.profile.cache import CoreUse, load_or_measure
from parallel.profile.calibrate import DeviceUse
from parallel.profile.gpu import in_cuda_process

FORMAT = 2
"""Raised when speeds kept by earlier versions no longer hold."""
SIZE = 64 << 20
"""Bytes of a copy; of a large tile's activations."""
WARM_UP, COPIES = 3, 9


@dataclass(frozen=True)
class CopySpeed:
    """Bytes per second of large copies of one rank, while all others of its machine copy, too. ``others``: share of
    this process's cores that other programs took meanwhile."""

    to_host: float
    to_device: float
    others: float = 0.0

    @property
    def bandwidth(self) -> float:
        """Return the bytes per second of what goes out and comes back."""
        return 2 / (1 / self.to_host + 1 / self.to_device)


def load_or_measure_copies(device: torch.device, *, threads: int = 1, together: int = 1) -> CopySpeed:
    """Return the speed kept of an earlier measurement, else measured now and kept. As ``measure_copies``."""
    use = DeviceUse(device, threads, together, torch.uint8, channels_last=False)
    key = use.key() | {"format": f"copies {FORMAT}"}
    return load_or_measure(
        key,
        "copies",
        "copies to the host",
        lambda: measure_copies(device, threads=threads, together=together),
        lambda text: CopySpeed(**{field.name: json.loads(text)[field.name] for field in fields(CopySpeed)}),
        lambda speed: json.dumps({"key": key, **asdict(speed)}),
    )


def measure_copies(device: torch.device, *, threads: int = 1, together: int = 1) -> CopySpeed:
    """Return the median of several copies each way, after a warm-up.

    Args:
        threads, together: as of ``DeviceUse``.
    """
    if device.type == "cuda":
        return CopySpeed(*in_cuda_process(gpu_copies, str(device)))
    use, before = CoreUse(), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        seconds = statistics.median(_in_memory(together))
    finally:
        torch.set_num_threads(before)
    return CopySpeed(SIZE / seconds, SIZE / seconds, use.others())


def gpu_copies(name: str) -> tuple[float, float]:
    """Return bytes per second to the host and to the device ``name``; opens a CUDA context."""
    device = torch.device(name)
    copies = CudaCopies(device)
    on_device = torch.ones(SIZE, dtype=torch.uint8, device=device)
    on_host = copies.empty_on_host(SIZE)
    for number in range(WARM_UP + COPIES):
        copies.clock.on = number >= WARM_UP
        copies.synchronize(copies.to_host(on_device, on_host))
        copies.synchronize(copies.to_device(on_host)[1])
    median = {
        way: statistics.median(time.bandwidth for time in copies.clock.times if time.direction == way)
        for way in ("out", "back")
    }
    return median["out"], median["back"]


def _in_memory(together: int) -> list[float]:
    """Return seconds of copies from one place of memory to another, by ``together`` threads together."""
    begin = threading.Barrier(together)

    def copy(_: int) -> list[float]:
        source, target = (torch.ones(SIZE, dtype=torch.uint8) for _ in range(2))
        begin.wait()
        seconds = []
        for _ in range(WARM_UP + COPIES):
            start = time.perf_counter()
            target.copy_(source)
            seconds.append(time.perf_counter() - start)
        return seconds[WARM_UP:]

    with ThreadPoolExecutor(together) as ranks:
        return [seconds for of_rank in ranks.map(copy, range(together)) for seconds in of_rank]
