"""NCCL's buffers count where ranks have a GPU each: by the links and sums of each strategy."""

from __future__ import annotations

import dataclasses

import pytest

from parallel.cost.cluster import Cluster
from parallel.cost.devices import LinkSpec
from parallel.plan.stages import communication_bytes
from parallel.space.team import Grid
from parallel.strategy import Strategy
from tests.parallel.plan.test_search import planner

LINK = LinkSpec("link", 1e9, 0.0)
GPUS = Cluster("GPUs", 1 << 34, 8, 8, LINK, LINK, 1e12, link_bytes=1, communicator_bytes=1000)
"""Counts links in ones, communicators in thousands."""
TWO = Grid(2, 1)


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        (Strategy("single", 1, 1, 8), 0),
        (Strategy("ddp", 8, 1, 8), 1000),
        (Strategy("fsdp", 8, 1, 8), 1000),
        (Strategy("1f1b", 2, 2, 8), 2),
        (Strategy("1f1b", 4, 4, 8), 4),
        (Strategy("1f1b", 8, 4, 8), 1004),
        (Strategy("bidirectional", 4, 4, 8), 1004),
        (Strategy("bidirectional", 4, 4, 8, shard_optimizer=True), 2004),
        (Strategy("spatial", 2, 1, 8, grid=TWO), 2000),
        (Strategy("1f1b", 4, 2, 8, grid=TWO), 2004),
        (Strategy("1f1b", 6, 3, 8, grid=TWO), 2008),
    ],
)
def test_links_and_sums_of_the_fullest_rank(strategy: Strategy, expected: int) -> None:
    assert communication_bytes(strategy, GPUS) == expected
    if strategy.splits:
        pairs = strategy.mesh.pairs({(stage, stage + 1): True for stage in range(strategy.stages - 1)})
        assert max(sum(rank in pair for pair in pairs) for rank in range(strategy.ranks)) == expected % 1000


def test_a_plan_counts_them_in_each_rank() -> None:
    one = planner()
    candidate = Strategy("1f1b", 4, 4, 8)
    without = one.evaluate(candidate).peak_bytes
    one = planner()
    one.stages.cluster = dataclasses.replace(one.cluster, link_bytes=1 << 20)
    assert one.evaluate(candidate).peak_bytes == tuple(peak + (4 << 20) for peak in without)
