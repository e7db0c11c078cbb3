"""Steps do not wait for a device once per norm, box or layer; counted operation by operation."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.helpers.device_counts import STRATEGIES, Counts, count
from tests.helpers.streaming import in_boxes

M = 2
STEP = {"step.py", "grad_reducer.py"}
"""Files that wait once a step and rank: for its losses, and for which parameters had no gradient."""
MAPS = {"maps.py"}
"""Maps of boxes go to the host and back."""


BLOCKS = 4


def net() -> nn.Module:
    layers: list[nn.Module] = []
    for _ in range(BLOCKS):
        layers += [nn.Conv2d(8 if layers else 3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 2))


@pytest.mark.parametrize("name", ["ddp, 2 ranks", "master, 2 stages", "spatial 2x1", "streaming, 1 rank"])
def test_waits_of_a_step(name: str) -> None:
    counts = count(STRATEGIES[name], net, 64, M)
    waits = {place: number for place, number in counts.syncs.items() if _file(place) not in MAPS}
    assert {_file(place) for place in waits} <= STEP
    assert sum(waits.values()) <= 2 * STRATEGIES[name]["ranks"]
    assert counts.operations["native_batch_norm_backward"] >= BLOCKS * M


def _file(place: str) -> str:
    return place.partition(" ")[0].rpartition("/")[2]


OPERATIONS = {
    "bilinear": nn.Upsample(scale_factor=2, mode="bilinear"),
    "corners": nn.Upsample(size=(29, 31), mode="bilinear", align_corners=True),
    "nearest": nn.Upsample(scale_factor=1.7, mode="nearest"),
    "average pool": nn.AvgPool2d(3, 2, 1, count_include_pad=False),
    "reflection": nn.ReflectionPad2d(3),
    "replication": nn.Conv2d(4, 4, 5, padding=2, padding_mode="replicate"),
    "batch norm": nn.BatchNorm2d(4),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_boxes_of_an_operation_wait_for_nothing(name: str) -> None:
    module = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), OPERATIONS[name], nn.Conv2d(4, 3, 2))
    images = torch.randn(1, 2, 23, 19)
    counts = Counts([*module.parameters(), *module.buffers(), images])
    run = in_boxes(module, 8)
    with counts.counting():
        run(module, images.requires_grad_())[0].sum().backward()
    assert sum(counts.operations.values()) > 20
    assert {_file(place) for place in counts.syncs} <= MAPS
