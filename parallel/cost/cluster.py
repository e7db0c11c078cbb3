"""The machines a plan is for: nodes of ranks, what joins them, and what their devices can hold and do, also by name.

Ranks are numbered node by node. Links are one device to another inside a node, and one network card a node between
nodes, which its ranks share. Figures of ``DEVICES`` are those the vendors print for dense arithmetic. NVIDIA: data
sheets of P100, T4, V100 (SXM2), A10, A40, A100 (SXM4), L4, L40S, RTX 6000 Ada, H100 and H200 (SXM5). The RTX cards:
its white papers on Turing, GA102 and Ada. AMD: MI250X, MI300X and EPYC 7742; Intel: Xeon 8280 (both at their base
clock). Where a sheet prints arithmetic with 2:4 sparsity, half of it stands here. Memory is what the driver reports, a
little below the printed size. No torch here.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from parallel.schedule.simulate import Device

GIB = 2**30
DTYPES = ("float32", "tf32", "bfloat16", "float16")
"""Arithmetic of matrix products; ``tf32`` is float32 data multiplied by tensor cores."""

Spec = TypeVar("Spec")


@dataclass(frozen=True)
class DeviceSpec:
    """One device, as its data sheet has it.

    Attributes:
        flops: dtype -> multiply-adds times two per second, at best; a dtype the device has no unit for is missing.
        bandwidth: bytes per second between memory and arithmetic, at best.
        host_link: name of the link between its memory and the host's, of the device's generation.
    """

    name: str
    memory_bytes: int
    flops: Mapping[str, float]
    bandwidth: float
    host_link: str = "pcie4"


@dataclass(frozen=True)
class LinkSpec:
    """Link between two ranks: bytes per second each way that large messages attain, and seconds of an empty message."""

    name: str
    bandwidth: float
    latency_s: float


LAUNCH_S = 5e-6
"""Seconds that an operation takes besides its work: of a CUDA or HIP kernel, first to last, 4 to 6 us on V100 and A100
(assumed alike on all)."""


def _gpu(name: str, gib: float, gigabytes_s: float, host_link: str, **teraflops: float) -> DeviceSpec:
    flops = {dtype: value * 1e12 for dtype, value in teraflops.items()}
    return DeviceSpec(name, round(gib * GIB), flops, gigabytes_s * 1e9, host_link)


def _cpu(name: str, cores: int, gigahertz: float, flops_per_cycle: int, gigabytes_s: float) -> DeviceSpec:
    """A processor with all of its cores and memory channels, next to GPUs; its memory is assumed."""
    flops = {"float32": cores * gigahertz * 1e9 * flops_per_cycle}
    return DeviceSpec(name, 128 * GIB, flops, gigabytes_s * 1e9)


DEVICES: Mapping[str, DeviceSpec] = {
    device.name: device
    for device in (
        _gpu("p100-16gb", 15.9, 732, "pcie3", float32=10.6, float16=21.2),
        _gpu("t4-16gb", 14.75, 320, "pcie3", float32=8.1, float16=65),
        _gpu("v100-16gb", 15.78, 900, "pcie3", float32=15.7, float16=125),
        _gpu("v100-32gb", 31.74, 900, "pcie3", float32=15.7, float16=125),
        _gpu("a10-24gb", 22.2, 600, "pcie4", float32=31.2, tf32=62.5, bfloat16=125, float16=125),
        _gpu("a40-48gb", 44.5, 696, "pcie4", float32=37.4, tf32=74.8, bfloat16=149.7, float16=149.7),
        _gpu("a100-40gb", 39.5, 1555, "pcie4", float32=19.5, tf32=156, bfloat16=312, float16=312),
        _gpu("a100-80gb", 79.2, 2039, "pcie4", float32=19.5, tf32=156, bfloat16=312, float16=312),
        _gpu("l4-24gb", 22.0, 300, "pcie4", float32=30.3, tf32=60, bfloat16=121, float16=121),
        _gpu("l40s-48gb", 44.4, 864, "pcie4", float32=91.6, tf32=183, bfloat16=362, float16=362),
        _gpu("h100-80gb", 79.1, 3350, "pcie5", float32=67, tf32=495, bfloat16=989, float16=989),
        _gpu("h200-141gb", 139.8, 4800, "pcie5", float32=67, tf32=495, bfloat16=989, float16=989),
        _gpu("rtx2080ti-11gb", 10.75, 616, "pcie3", float32=13.4, float16=53.8),
        _gpu("rtxa6000-48gb", 47.5, 768, "pcie4", float32=38.7, tf32=77.4, bfloat16=154.8, float16=154.8),
        _gpu("rtx3090-24gb", 23.6, 936, "pcie4", float32=35.6, tf32=35.6, bfloat16=71, float16=71),
        _gpu("rtx4090-24gb", 23.6, 1008, "pcie4", float32=82.6, tf32=82.6, bfloat16=165.2, float16=165.2),
        _gpu("rtx6000ada-48gb", 47.4, 960, "pcie4", float32=91.1, tf32=182.1, bfloat16=364.2, float16=364.2),
        _gpu("mi250x-gcd-64gb", 63.9, 1638, "pcie4", float32=47.9, bfloat16=191.5, float16=191.5),
        _gpu("mi300x-192gb", 191.6, 5300, "pcie5", float32=163.4, tf32=653.7, bfloat16=1307.4, float16=1307.4),
        _cpu("epyc7742-64c", 64, 2.25, 32, 204.8),
        _cpu("xeon8280-28c", 28, 2.7, 64, 140.8),
    )
}
"""By name. An MI250X is two devices (GCDs) to its programs; this is one of them."""

NVLINK, PCIE, INFINIBAND, ETHERNET = 0.9, 0.8, 0.95, 0.9
"""Attained fraction of a link's printed bandwidth; assumed, after what bandwidth tests (p2pBandwidthLatencyTest,
OSU osu_bw, iperf3) commonly report for large messages."""


def _link(name: str, gigabytes_s: float, attained: float, latency_us: float) -> LinkSpec:
    return LinkSpec(name, gigabytes_s * 1e9 * attained, latency_us * 1e-6)


LINKS: Mapping[str, LinkSpec] = {
    link.name: link
    for link in (
        _link("nvlink2", 75, NVLINK, 8),  # three bricks of 25 GB/s, as between neighbours in an AC922 node
        _link("nvlink2-switch", 150, NVLINK, 8),  # all six bricks, DGX-2
        _link("nvlink3", 300, NVLINK, 8),  # A100, twelve bricks
        _link("nvlink4", 450, NVLINK, 8),  # H100 and H200, eighteen bricks
        _link("pcie3", 15.75, PCIE, 10),  # sixteen lanes, 128b/130b coding taken off; the same below
        _link("pcie4", 31.5, PCIE, 10),
        _link("pcie5", 63, PCIE, 10),
        _link("edr-infiniband", 12.5, INFINIBAND, 5),
        _link("hdr-infiniband", 25, INFINIBAND, 5),
        _link("ndr-infiniband", 50, INFINIBAND, 5),
        _link("ethernet-1g", 0.125, ETHERNET, 50),
        _link("ethernet-10g", 1.25, ETHERNET, 30),
        _link("ethernet-25g", 3.125, ETHERNET, 30),
        _link("ethernet-100g", 12.5, ETHERNET, 20),
    )
}
"""By name."""


def device_named(name: str) -> DeviceSpec:
    """Return the device called ``name``; a ValueError says the close ones and all where there is none."""
    return _named(name, DEVICES, "device")


def link_named(name: str) -> LinkSpec:
    """Return the link called ``name``; a ValueError says the close ones and all where there is none."""
    return _named(name, LINKS, "link")


def _named(name: str, known: Mapping[str, Spec], what: str) -> Spec:
    spec = known.get(name.strip().lower())
    if spec is None:
        close = difflib.get_close_matches(name.lower(), known, n=3, cutoff=0.4)
        hint = f"; close are {', '.join(close)}" if close else ""
        raise ValueError(f"{name!r} is no {what} whose data sheet is known{hint}. All of them: {', '.join(known)}")
    return spec


FILL = {"cuda": 0.9, "cpu": 0.75}
"""Part of a rank's memory that a plan fills, by kind of device: allocators keep a reserve besides live bytes. Up to a
third of it on a CPU, with large tiles in a U-Net (``parallel.profile.cache``)."""
LIBRARIES = {"cuda": 512 << 20, "cpu": 128 << 20}
"""Bytes that a rank takes at most besides these. On a CPU work space and reordered copies of oneDNN, and what Gloo
copies, as measured in ``benchmarks/plan_accuracy``; on a GPU work space of cuDNN and cuBLAS, assumed."""
LINK_BYTES, COMMUNICATOR_BYTES = 32 << 20, 128 << 20
"""Bytes of a GPU that NCCL allocates for messages from one rank to another, and for sums of several ranks; assumed
where they are not measured. A channel takes 4 to 10 MiB for each neighbour."""


@dataclass(frozen=True)
class Cluster:
    """Ranks and what joins them.

    Attributes:
        memory_bytes: that each rank may use.
        per_node: ranks of a node.
        lanes: ranks of a node that can compute at the same time without slowing each other; its GPUs, or cores by
            threads.
        inside, between: the links inside a node and from one node to another.
        update_bandwidth: bytes per second that an optimizer reads and writes.
        kind: of the devices, "cpu" or "cuda". On a CPU sums are computed by the cores that backward passes need, and
            hide behind nothing but waiting.
        sums: the link that sums inside a node seem to have, where that is another.
        beside_backward: times as long as alone that data-parallel sums take when they overlap backward passes that need
            the same cores.
        gathering: times half a sum that gathering or scattering parts of parameters takes.
        copy_bandwidth: bytes per second between a rank's device and the host, each way, while all ranks copy.
        host_bytes: of the host's memory that each rank may fill with what it moves there.
        inside_team: the link that members of a team inside a node seem to have while they compute, where that is
            another.
        link_bytes, communicator_bytes: of a rank's memory, that NCCL allocates for each rank that it sends to or
            receives from, and for each group of ranks that it sums with; 0 between CPUs.
        speeds: of the ranks, as multiples of that which the times of layers are for, the slowest's; empty: 1.
    """

    name: str
    memory_bytes: int
    per_node: int
    lanes: float
    inside: LinkSpec
    between: LinkSpec
    update_bandwidth: float
    kind: str = "cuda"
    sums: LinkSpec | None = None
    beside_backward: float = 1.0
    gathering: float = 1.0
    copy_bandwidth: float = math.inf
    host_bytes: float = math.inf
    inside_team: LinkSpec | None = None
    link_bytes: int = 0
    communicator_bytes: int = 0
    speeds: tuple[float, ...] = ()

    def speeds_of(self, ranks: Sequence[int]) -> tuple[float, ...]:
        """Return the speeds of some ranks, 1 for the slowest device."""
        return tuple(self.speeds[rank] for rank in ranks) if self.speeds else (1.0,) * len(ranks)

    @property
    def usable_bytes(self) -> int:
        """Return the bytes of each rank's memory that may be allocated at the peak of a step."""
        return max(1, round(FILL[self.kind] * self.memory_bytes) - LIBRARIES[self.kind])

    def needed_bytes(self, living: int) -> int:
        """Return the memory of a rank of which ``living`` bytes are usable."""
        return math.ceil((living + LIBRARIES[self.kind]) / FILL[self.kind])

    def link(self, first: int, second: int) -> LinkSpec | None:
        """Return the link between two ranks; None from a rank to itself."""
        if first == second:
            return None
        return self.inside if first // self.per_node == second // self.per_node else self.between

    def team_link(self, members: int) -> LinkSpec:
        """Return the link between the ``members`` of a team, the first ranks of a node, while they compute."""
        return self.between if members > self.per_node else self.inside_team or self.inside

    def exchange_s(self, messages: int, members: int) -> float:
        """Return what an exchange in which a member is sent ``messages`` takes it, their bytes aside.

        Between members that compute half of what was measured of two, who send each other one message, is the
        message's, and half is what a rank does once: rows packed and concatenated, halos recomputed, waiting for the
        slower one.
        """
        link = self.team_link(members)
        return link.latency_s * ((1 + messages) / 2 if link is self.inside_team else messages)

    def hides(self, members: int) -> bool:
        """Return whether the ``members`` of a team compute on while pieces of maps travel: inside a node without
        accelerators the cores that compute hand them on."""
        return self.kind != "cpu" or members > self.per_node

    def slowdown(self, ranks: int) -> float:
        """Return by how much ranks that all compute at the same time slow each other."""
        return max(1.0, min(ranks, self.per_node) / self.lanes)

    def devices(self, ranks: int, groups: int = 1, members: int = 1) -> list[Device]:
        """Return the devices that the first ``ranks`` ranks share; empty where each has a device of its own.

        Args:
            groups: of equal numbers of ranks that do the same at the same time; those on one node share its lanes.
            members: of a team, in place of each rank, that do the same at the same time, too.
        """
        teams = max(1, self.per_node // members)
        lanes = self.lanes / min(members, self.per_node) / max(1, min(groups, teams // ranks))
        if lanes >= min(ranks, teams):
            return []
        return [Device(tuple(range(begin, min(begin + teams, ranks))), lanes) for begin in range(0, ranks, teams)]

    def sum_s(self, size: int, holders: Sequence[int], *, at_once: int = 1) -> float:
        """Time to sum ``size`` bytes over ``holders`` by a ring: everybody sends 2 (n - 1) / n of them (Patarasuk and
        Yuan, J. Parallel Distrib. Comput. 2009).

        Args:
            at_once: ranks of a node that sum at the same time, each with others, over its one network card.
        """
        n = len(set(holders))
        if n < 2:
            return 0.0
        crosses = len({rank // self.per_node for rank in holders}) > 1
        link = self.between if crosses else self.sums or self.inside
        bandwidth = link.bandwidth / at_once if crosses else link.bandwidth
        return 2 * (n - 1) / n * size / bandwidth + 2 * (n - 1) * link.latency_s
