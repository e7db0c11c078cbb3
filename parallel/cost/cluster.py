"""The machines a plan is for: nodes of ranks, what joins them, and what their devices can hold and do.

Ranks are numbered node by node. Links are one device to another inside a node, and one network card a node between
nodes, which its ranks share. No torch here, and no figure of its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from parallel.cost.devices import LinkSpec
from parallel.schedule.simulate import Device

FILL = {"cuda": 0.9, "cpu": 0.75}
"""Part of a rank's memory that a plan fills, by kind of device: allocators keep a reserve beside what lives. Up to a
third of it on a CPU, with large tiles in a U-Net (``parallel.profile.malloc``)."""
LIBRARIES = {"cuda": 512 << 20, "cpu": 128 << 20}
"""Bytes that a rank takes at most beside these. On a CPU work space and reordered copies of oneDNN, and what Gloo
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
        beside_backward: times as long as by themselves that data-parallel sums take, beside backward passes that need
            the same cores.
        gathering: times half a sum that gathering or scattering parts of parameters takes.
        copy_bandwidth: bytes per second between a rank's device and the host, each way, while all ranks copy.
        host_bytes: of the host's memory that each rank may fill with what it moves there.
        told: the link that members of a team inside a node seem to have while they compute, where that is another.
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
    told: LinkSpec | None = None
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

    def told_link(self, members: int) -> LinkSpec:
        """Return the link between the ``members`` of a team, the first ranks of a node, while they compute."""
        return self.between if members > self.per_node else self.told or self.inside

    def exchange_s(self, messages: int, members: int) -> float:
        """Return what an exchange in which a member is sent ``messages`` takes it, their bytes aside.

        Between members that compute half of what was measured of two, who send each other one message, is the
        message's, and half is what a rank does once: rows packed and concatenated, halos recomputed, waiting for the
        slower one.
        """
        link = self.told_link(members)
        return link.latency_s * ((1 + messages) / 2 if link is self.told else messages)

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
            groups: of as many ranks that do the same at the same time; those on one node share its lanes.
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
