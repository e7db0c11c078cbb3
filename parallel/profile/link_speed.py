"""The speed of messages and sums between ranks of this machine, and of copies to the host, measured and kept.

Over Gloo: messages there and back, messages between ranks that compute, sums by themselves, and sums of gradients and
gathered parameters of FSDP2 overlapped with backward passes. On GPUs, over NCCL, or over Gloo where they share one:
messages between neighbours, sums, and what NCCL allocates.

On a GPU the host's memory is page-locked, as for offloading. On a CPU these are copies in memory, made by one thread
for each rank that will compute, because the ranks share the memory.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from parallel.cost.cluster import LinkSpec
from parallel.offload.copies import CudaCopies
from parallel.profile.cache import CoreUse, kept_at, load_or_measure
from parallel.profile.calibrate import DeviceUse
from parallel.profile.gpu import in_cuda_process, in_process

FORMAT, COPY_FORMAT = 2, 2
"""Raised when speeds kept by earlier versions no longer hold."""
SIZE = 64 << 20
"""Bytes of a copy; of a large tile's activations."""
WARM_UP, COPIES = 3, 9
ROUNDS = 7
TAKES_S = 25
"""About, with the start of the ranks."""
TIMEOUT_S = 300.0


@dataclass(frozen=True)
class LinkSpeed:
    """The speed between the ranks of this machine while all of them communicate.

    Attributes:
        message_bandwidth, message_s: bytes per second of a large message one way, and seconds of an empty one.
        sum_bandwidth, sum_s: the same of the links of a ring that would sum in the time that sums take.
        beside_backward: times as long as by themselves that sums of gradients hold up a backward pass.
        gathering: times half a sum that FSDP2 holds up a pass by gathering or scattering.
        told_s: seconds that an exchange delays two members of a team (``MemberPass``).
        others: share of the cores that other programs took meanwhile.
        link_bytes, communicator_bytes: of a GPU's memory that NCCL allocates for messages from one rank to another, and
            for sums of several; 0 on CPUs.
    """

    message_bandwidth: float
    message_s: float
    sum_bandwidth: float
    sum_s: float
    beside_backward: float
    gathering: float
    told_s: float
    others: float = 0.0
    link_bytes: float = 0.0
    communicator_bytes: float = 0.0

    @property
    def messages(self) -> LinkSpec:
        """Return the link of messages."""
        return LinkSpec("between ranks of this machine", self.message_bandwidth, self.message_s)

    @property
    def in_team(self) -> LinkSpec:
        """Return the link between members of a team."""
        return LinkSpec("between members of a team on this machine", self.message_bandwidth, self.told_s)

    @property
    def sums(self) -> LinkSpec:
        """Return the link of sums."""
        return LinkSpec("sums of ranks of this machine", self.sum_bandwidth, self.sum_s)


def links_kept_at(ranks: int, threads: int, device: str = "cpu") -> Path | None:
    """Return the file of the speed between ``ranks`` of ``threads`` each, whether there is one or not."""
    return kept_at(_key(ranks, threads, device), "links")


def load_or_measure_links(ranks: int, *, threads: int = 1, device: str = "cpu") -> LinkSpeed:
    """Return the speed kept of an earlier measurement, else measured now and kept. As ``measure_links``."""
    key = _key(ranks, threads, device)
    return load_or_measure(
        key,
        "links",
        "messages and sums between ranks",
        lambda: measure_links(ranks, threads=threads, device=device),
        lambda text: LinkSpeed(**{field.name: json.loads(text)[field.name] for field in dataclasses.fields(LinkSpeed)}),
        lambda speed: json.dumps({"key": key, **asdict(speed)}),
    )


def measure_links(ranks: int, *, threads: int = 1, device: str = "cpu", rounds: int = ROUNDS) -> LinkSpeed:
    """Return the speed from medians over ``rounds``, after a warm-up.

    Args:
        ranks: started for it; 2 or more.
        threads: of each.
        device: "cpu", or "cuda", of which ranks may share one.

    Raises:
        RuntimeError: the ranks did not come to an end; says what they printed last.
    """
    use = CoreUse()
    settings = {"ranks": ranks, "threads": threads, "device": device, "rounds": rounds}
    try:
        seconds = in_process("parallel.profile.link_worker", "measure_by_ranks", settings, timeout_s=TIMEOUT_S)
    except RuntimeError as fault:
        raise RuntimeError(
            f"a plan has to know how fast {ranks} ranks of this machine talk to each other, and those that were "
            f"started to measure it said: {fault}"
        ) from None
    return dataclasses.replace(speed_of(seconds, ranks), others=use.others() if device == "cpu" else 0.0)


def speed_of(seconds: Mapping[str, float], ranks: int) -> LinkSpeed:
    """Return the speed that follows from ``seconds``, as ``link_worker`` measures them. GPUs are taken to sum and send
    as fast during computation as without.

    A ring sends 2 (n - 1) / n of what n ranks sum, in 2 (n - 1) turns (Patarasuk and Yuan 2009).
    """
    turns = 2 * (ranks - 1)
    moved = max(seconds["message"] - seconds["empty_message"], 1e-9)
    summed = max(seconds["sum"] - seconds["empty_sum"], 1e-9)
    sum_bandwidth = turns / ranks * seconds["sum_bytes"] / summed
    speed = LinkSpeed(
        message_bandwidth=seconds["message_bytes"] / moved,
        message_s=seconds["empty_message"],
        sum_bandwidth=sum_bandwidth,
        sum_s=seconds["empty_sum"] / turns,
        beside_backward=1.0,
        gathering=1.0,
        told_s=seconds["empty_message"],
        link_bytes=seconds.get("link_bytes", 0.0),
        communicator_bytes=seconds.get("communicator_bytes", 0.0),
    )
    if "alone" not in seconds:
        return speed
    of_net = turns / ranks * seconds["net_bytes"] / sum_bandwidth + seconds["empty_sum"]
    return dataclasses.replace(
        speed,
        beside_backward=max(0.0, seconds["replicated"] - seconds["alone"]) / of_net,
        # Gathered for each of the two passes, and scattered once.
        gathering=max(0.0, seconds["sharded"] - seconds["alone"]) / 3 / (of_net / 2),
        told_s=max(0.0, seconds["member"] - seconds["member_alone"]) / seconds["exchanges"],
    )


def _key(ranks: int, threads: int, device: str) -> dict[str, Any]:
    known = DeviceUse(torch.device(device), threads, ranks, channels_last=False).key()
    gpus = {} if device == "cpu" else {"gpus": torch.cuda.device_count()}
    return known | {"format": f"links {FORMAT}"} | gpus


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
    key = use.key() | {"format": f"copies {COPY_FORMAT}"}
    return load_or_measure(
        key,
        "copies",
        "copies to the host",
        lambda: measure_copies(device, threads=threads, together=together),
        lambda text: CopySpeed(**{field.name: json.loads(text)[field.name] for field in dataclasses.fields(CopySpeed)}),
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
    on_device = torch.ones(SIZE, dtype=torch.uint8, device=device)
    on_host = CudaCopies(device).empty_on_host(SIZE)

    def bandwidth(source: Tensor, target: Tensor) -> float:
        milliseconds: list[float] = []
        for _ in range(WARM_UP + COPIES):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            begin.record()
            target.copy_(source, non_blocking=True)
            end.record()
            end.synchronize()
            milliseconds.append(begin.elapsed_time(end))
        return 1000 * SIZE / statistics.median(milliseconds[WARM_UP:])

    with torch.cuda.device(device):
        return bandwidth(on_device, on_host), bandwidth(on_host, on_device)


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
