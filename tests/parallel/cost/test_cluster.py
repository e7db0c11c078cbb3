"""Links, shared devices and sums of a cluster of two nodes."""

from __future__ import annotations

import dataclasses

import pytest

from parallel.cost.cluster import FILL, LIBRARIES, Cluster
from parallel.cost.devices import LinkSpec

INSIDE, BETWEEN = LinkSpec("fast", 100.0, 0.0), LinkSpec("slow", 10.0, 1.0)


def cluster(lanes: float = 4) -> Cluster:
    return Cluster("two nodes of four", 1000, 4, lanes, INSIDE, BETWEEN, 1e9)


def test_links() -> None:
    assert cluster().link(0, 3) is INSIDE
    assert cluster().link(3, 4) is BETWEEN
    assert cluster().link(2, 2) is None


def test_ring_sums() -> None:
    assert cluster().sum_s(100, [0]) == 0
    assert cluster().sum_s(100, [0, 1]) == pytest.approx(1.0)  # 2 x 1/2 x 100 bytes at 100 a second
    assert cluster().sum_s(100, [0, 4]) == pytest.approx(10 + 2)
    assert cluster().sum_s(100, [0, 4], at_once=4) == pytest.approx(40 + 2)
    assert cluster().sum_s(100, [0, 0, 1, 1]) == cluster().sum_s(100, [0, 1])


def test_shared_devices() -> None:
    assert cluster().devices(8) == []
    assert [device.ranks for device in cluster(lanes=2).devices(6)] == [(0, 1, 2, 3), (4, 5)]
    assert cluster().devices(2, groups=4) == []
    assert [device.lanes for device in cluster(lanes=2).devices(2, groups=4)] == [1]  # two groups on a node
    assert cluster(lanes=2).slowdown(8) == 2
    assert cluster(lanes=2).slowdown(2) == 1


def test_what_is_usable_is_what_is_needed() -> None:
    for kind in ("cpu", "cuda"):
        one = dataclasses.replace(cluster(), kind=kind, memory_bytes=1 << 30)
        assert one.needed_bytes(one.usable_bytes) == pytest.approx(1 << 30, abs=2)
        assert one.usable_bytes == pytest.approx(FILL[kind] * (1 << 30) - LIBRARIES[kind], abs=1)
        assert dataclasses.replace(one, memory_bytes=1000).usable_bytes == 1  # libraries take all of it
