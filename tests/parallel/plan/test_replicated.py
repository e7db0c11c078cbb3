"""Stages with replicas: the plans that PipeDream published for its profiles, and every partition of small models."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parallel.plan.replicated import ReplicatedStage, best_replicated

VGG16 = (
    (56.9, 7, 1605632), (178.7, 144, 401408), (59.9, 288, 802816), (85.6, 576, 200704), (31.9, 1153, 401408),
    (47.6, 2305, 401408), (53.7, 2305, 100352), (25.5, 4610, 200704), (38.8, 9218, 200704), (43.6, 9218, 50176),
    (14.0, 9218, 50176), (12.1, 9218, 50176), (14.1, 9218, 12544), (7.5, 401424, 2048), (1.8, 65552, 2048),
    (0.9, 16003, 0),
)  # fmt: skip
"""Milliseconds forward and backward, KiB of parameters and of the output, of each layer with weights and those without
behind it, for a minibatch of 64: profiler/image_classification/profiles/vgg16 of github.com/msr-fiddle/pipedream at
7db6a1c, Copyright (c) Microsoft Corporation, MIT license. The input is left out."""
RESNET50 = (
    (26.9, 37, 100352), (42.9, 293, 401408), (33.1, 275, 401408), (35.6, 275, 401408), (46.3, 1482, 200704),
    (20.3, 1094, 200704), (19.8, 1094, 200704), (21.6, 1094, 200704), (40.1, 5908, 100352), (17.4, 4364, 100352),
    (16.3, 4364, 100352), (16.3, 4364, 100352), (16.2, 4364, 100352), (17.3, 4364, 100352), (35.4, 23592, 50176),
    (17.0, 17432, 50176), (20.3, 17432, 1024), (0.6, 8003, 0),
)  # fmt: skip
"""The same of profiles/resnet50, block by block, for a minibatch of 128."""
TEN_GIGABIT, PCIE = 1.25e9, 10e9


def replicas(model: tuple[tuple[float, int, int], ...], ranks: int, bandwidth: float) -> tuple[float, str]:
    """Return the seconds of a minibatch, and the ranks of the stages as the paper writes them."""
    times, parameters, sent = zip(*model, strict=True)
    seconds, stages = best_replicated(
        [ms / 1000 for ms in times], [1024 * k for k in parameters], [1024 * k for k in sent], ranks, bandwidth
    )
    return seconds, "-".join(str(stage.ranks) for stage in stages)


@pytest.mark.parametrize(
    ("model", "ranks", "bandwidth", "plan"),
    [
        (VGG16, 4, TEN_GIGABIT, "3-1"),
        (VGG16, 16, PCIE, "15-1"),
        (RESNET50, 4, TEN_GIGABIT, "4"),
        (RESNET50, 16, PCIE, "16"),
    ],
)
def test_published_plans(model: tuple[tuple[float, int, int], ...], ranks: int, bandwidth: float, plan: str) -> None:
    """VGG-16 with nearly all ranks on its convolutions, ResNet-50 data parallel (driver_configs of the repository)."""
    assert replicas(model, ranks, bandwidth)[1] == plan


def test_the_seconds_of_the_published_optimizer() -> None:
    """0.2055 s a minibatch with 1e9 B/s, as optimizer_graph_hierarchical.py gives with the messages counted."""
    assert replicas(VGG16, 4, 1e9)[0] == pytest.approx(0.2055, abs=1e-4)


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_no_partition_is_faster(data: st.DataObject) -> None:
    size, ranks = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 4))
    numbers = st.lists(st.integers(0, 20).map(float), min_size=size, max_size=size)
    seconds, parameters, sent = data.draw(numbers), data.draw(numbers), data.draw(numbers)

    def time_of(stages: tuple[ReplicatedStage, ...]) -> float:
        worst = 0.0
        for each in stages:
            compute, weights = (sum(values[each.start : each.stop]) for values in (seconds, parameters))
            arriving = 2 * sent[each.start - 1] if each.start else 0.0
            worst = max(worst, max(compute, 2 * (each.ranks - 1) * weights, arriving) / each.ranks)
        return worst

    found, stages = best_replicated(seconds, parameters, sent, ranks, 1.0)
    assert found == pytest.approx(time_of(stages))
    assert sum(each.ranks for each in stages) == ranks
    assert found == pytest.approx(min(map(time_of, _partitions(size, ranks))))


def _partitions(size: int, ranks: int) -> Iterator[tuple[ReplicatedStage, ...]]:
    for count in range(1, min(size, ranks) + 1):
        for cuts in itertools.combinations(range(1, size), count - 1):
            for splits in itertools.combinations(range(1, ranks), count - 1):
                windows = itertools.pairwise((0, *cuts, size))
                owners = [b - a for a, b in itertools.pairwise((0, *splits, ranks))]
                yield tuple(ReplicatedStage(q, a, b) for q, (a, b) in zip(owners, windows, strict=True))
