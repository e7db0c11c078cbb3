"""Exchanges of a layer within a team, on paper: their bytes, and their seconds on a cluster. No torch here."""

from __future__ import annotations

from dataclasses import dataclass, field

from parallel.cost.cluster import Cluster
from parallel.cost.stage_cost import LayerCost
from parallel.space.team import Exchange, is_small_all_reduce


@dataclass(frozen=True)
class Halo:
    """A piece of a map on its way, for one tile.

    Attributes:
        bytes: that the member which fetches most is sent; ``all_bytes``: all members together.
        messages: that the member is sent.
        back: gradients return.
        overlapped: the member computes its own part of what needs it while it travels.
    """

    bytes: int
    all_bytes: int
    messages: int
    back: bool
    overlapped: bool = False

    @classmethod
    def of(cls, exchange: Exchange, px_bytes: int, back: bool, overlapped: bool = False) -> Halo:
        return cls(exchange.received_px * px_bytes, exchange.px * px_bytes, exchange.messages, back, overlapped)


@dataclass(frozen=True)
class Sum:
    """A sum over the members of a team.

    Attributes:
        bytes: that each member gives.
        gathered: members learn what each has given.
    """

    bytes: int
    gathered: bool = False


@dataclass
class HaloTraffic:
    """Exchanges of a layer within a team, for one tile.

    Attributes:
        forward_sums, backward_sums: over the members.
        forward_copied, backward_copied: bytes that are read or written to put boxes together and to take them apart.
    """

    halos: list[Halo] = field(default_factory=list)
    forward_sums: list[Sum] = field(default_factory=list)
    backward_sums: list[Sum] = field(default_factory=list)
    forward_copied: int = 0
    backward_copied: int = 0


NO_TRAFFIC = HaloTraffic()


def with_traffic(cost: LayerCost, traffic: HaloTraffic, tiles: int, members: int, cluster: Cluster) -> LayerCost:
    """Return ``cost`` with what its layer exchanges in a team of the cluster's first ``members`` ranks."""
    if traffic == NO_TRAFFIC:
        return cost
    link = cluster.told_link(members)
    forward = tiles * traffic.forward_copied / cluster.update_bandwidth
    backward = tiles * traffic.backward_copied / cluster.update_bandwidth
    for halo in traffic.halos:
        seconds = tiles * halo.bytes / link.bandwidth + cluster.exchange_s(halo.messages, members)
        hides = halo.overlapped and cluster.hides(members)
        forward += max(0.0, seconds - cost.forward_s * hides)
        backward += max(0.0, seconds - cost.backward_s * hides) * halo.back
    forward += sum(sum_in_team_s(each, members, cluster) for each in traffic.forward_sums)
    backward += sum(sum_in_team_s(each, members, cluster) for each in traffic.backward_sums)
    return LayerCost(cost.forward_s + forward, cost.backward_s + backward, cost.backward_input_s + backward)


def sum_in_team_s(summed: Sum, members: int, cluster: Cluster) -> float:
    """Return the seconds of a sum over the cluster's first ``members`` ranks."""
    if cluster.kind == "cpu" and is_small_all_reduce(summed.bytes, members):
        messages = members - 1
        return cluster.exchange_s(messages, members) + messages * summed.bytes / cluster.told_link(members).bandwidth
    return cluster.sum_s(summed.bytes * (members if summed.gathered else 1), range(members))
