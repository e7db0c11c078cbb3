"""Times from a data sheet: published step times, and how they go with tile, type and device."""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch
from torch import nn

from models.registry import build_model
from parallel.cost.cluster import DEVICES, FILL, LAUNCH_S, LIBRARIES, LINKS, Cluster, LinkSpec, device_named, link_named
from parallel.cost.roofline import cost_on
from parallel.graph.layers import LayerGraph
from parallel.trace.trace import trace
from tests.helpers.small_nets import Made


@functools.cache
def graph_of(model: str, shape: tuple[int, ...]) -> LayerGraph:
    with torch.device("meta"):
        module = build_model(model, classes=2)
    return trace(module, shape).graph


def test_published_steps_of_resnet50_are_met() -> None:
    graph = graph_of("torchvision:resnet50", (256, 3, 224, 224))
    published = {
        ("v100-16gb", "float32"): 367,
        ("v100-16gb", "float16"): 1200,
        ("a100-80gb", "tf32"): 938,
        ("a100-80gb", "float16"): 2470,
    }
    for (device, dtype), images_per_second in published.items():
        seconds = sum(cost_on(graph, device_named(device), dtype).seconds)
        assert 256 / seconds == pytest.approx(images_per_second, rel=0.10), (device, dtype)


def test_larger_tiles_cost_in_proportion_and_slower_devices_more() -> None:
    small, large = (
        sum(cost_on(graph_of("unet_w16", (1, 3, px, px)), DEVICES["v100-16gb"]).seconds) for px in (512, 2048)
    )
    assert 12 < large / small < 16  # launches do not grow
    graph = graph_of("unet_w16", (1, 3, 512, 512))
    seconds = [
        sum(cost_on(graph, DEVICES[name]).seconds) for name in ("t4-16gb", "v100-16gb", "a100-80gb", "h100-80gb")
    ]
    assert seconds == sorted(seconds, reverse=True)
    norm, device = trace(nn.Sequential(nn.BatchNorm2d(64)), (1, 64, 2048, 2048)).graph, DEVICES["a100-80gb"]
    single, half = (sum(cost_on(norm, device, dtype).seconds) for dtype in ("float32", "bfloat16"))
    assert half == pytest.approx(single / 2, rel=0.05)  # half the bytes


def test_backward_of_a_convolution_is_twice_its_forward_unless_nothing_flows_on() -> None:
    model = nn.Sequential(nn.Conv2d(3, 64, 3, padding=1), nn.Conv2d(64, 64, 3, padding=1))
    graph = trace(model, (1, 3, 512, 512)).graph
    first, second = (cost for cost in cost_on(graph, DEVICES["v100-16gb"]).layers if cost.seconds)
    assert first.backward_s == pytest.approx(first.forward_s)
    assert first.backward_input_s == 0
    assert second.backward_s == pytest.approx(2 * second.forward_s)
    assert second.backward_input_s == pytest.approx(second.forward_s)


def test_gradients_of_a_value_used_twice_are_added_up() -> None:
    parts = {name: nn.Conv2d(3, 3, 1) for name in ("first", "left", "right")}
    fork = Made(lambda m, x: torch.cat([m.left(y := m.first(x)), m.right(y)], 1), **parts)

    graph = trace(fork, (1, 3, 2048, 2048)).graph
    costs = dict(zip(graph.by_name, cost_on(graph, DEVICES["v100-16gb"]).layers, strict=True))
    moved = 3 * graph.by_name["first"].output_bytes / (0.8 * 900e9)
    assert costs["first"].backward_input_s == pytest.approx(moved + LAUNCH_S)


def test_names_of_devices_links_and_types() -> None:
    assert device_named("V100-16GB ") is DEVICES["v100-16gb"]
    assert link_named("EDR-InfiniBand") is LINKS["edr-infiniband"]
    assert {link_named(device.host_link).name for device in DEVICES.values()} == {"pcie3", "pcie4", "pcie5"}
    assert link_named(DEVICES["v100-16gb"].host_link).bandwidth == pytest.approx(12.6e9)
    graph = trace(nn.Conv2d(3, 8, 3), (1, 3, 32, 32)).graph
    for find, words in (
        (lambda: device_named("v100"), "v100-16gb, v100-32gb"),
        (lambda: device_named("abacus"), "All of them: p100-16gb"),
        (lambda: link_named("infiniband"), "edr-infiniband"),
        (lambda: cost_on(graph, DEVICES["v100-16gb"], "bfloat16"), "float32, float16; got dtype 'bfloat16'"),
        (lambda: cost_on(graph, DEVICES["v100-16gb"], "float31"), "no such type"),
    ):
        with pytest.raises(ValueError, match=words):
            find()


INSIDE, BETWEEN = LinkSpec("fast", 100.0, 0.0), LinkSpec("slow", 10.0, 1.0)


def cluster(lanes: float = 4) -> Cluster:
    return Cluster("two nodes of four", 1000, 4, lanes, INSIDE, BETWEEN, 1e9)


def test_links_and_ring_sums() -> None:
    links = [cluster().link(*pair) for pair in ((0, 3), (3, 4), (2, 2))]
    assert links == [INSIDE, BETWEEN, None]
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
