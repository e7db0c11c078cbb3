"""Blocks computed again beside offload: as many as have room."""

from __future__ import annotations

from torch import nn

from parallel.graph.partition import Partition
from parallel.memory.recompute_beside_offload import runs_beside_offload
from parallel.trace.trace import trace


def _partition() -> Partition:
    def block(channels: int) -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU())

    model = nn.Sequential(nn.Conv2d(3, 8, 1), block(8), nn.MaxPool2d(2), block(8), nn.MaxPool2d(2), block(8))
    return Partition(trace(model, (1, 3, 16, 16)).graph, (0,))


def test_blocks_with_the_largest_values_are_given_up_first() -> None:
    partition = _partition()
    everything = runs_beside_offload(partition, lambda runs: True)
    assert everything is not None
    assert len(everything) >= 2
    fewer = runs_beside_offload(partition, lambda runs: len(runs) < len(everything))
    assert fewer is not None
    assert set(everything) - set(fewer) == {everything[0]}  # the first block's values are the largest


def test_one_that_fits_after_all_is_taken_again() -> None:
    partition = _partition()
    everything = runs_beside_offload(partition, lambda runs: True)
    assert everything is not None
    heavy = everything[-1]  # given up last, and the only one that takes anything
    assert runs_beside_offload(partition, lambda runs: heavy not in runs) == tuple(r for r in everything if r != heavy)
    assert runs_beside_offload(partition, lambda runs: False) is None
