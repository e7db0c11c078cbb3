"""Segments cover a stage, begin where stages could, and keep what is needed again immediately."""

from __future__ import annotations

import functools

import pytest

from parallel.graph.blocks import block_cuts
from parallel.graph.partition import Partition, cut_positions, partition_equal
from parallel.memory.policy import ActivationPolicy, Segment, segments_of
from parallel.trace.trace import trace
from tests.parallel.memory.test_rank_bytes import net


@functools.cache
def unet(stages: int) -> Partition:
    return partition_equal(trace(*net("unet_w8")).graph, stages)


def every(partition: Partition, policy: ActivationPolicy) -> list[Segment]:
    return [each for stage in range(partition.depth) for each in segments_of(partition, stage, policy)]


@pytest.mark.parametrize("stages", [1, 3])
def test_they_cover_every_stage(stages: int) -> None:
    partition = unet(stages)
    found = every(partition, ActivationPolicy("block"))
    allowed = {0, *cut_positions(partition.graph), len(partition.graph.layers)}
    assert [each.start for each in found] == [0, *(each.stop for each in found[:-1])]
    assert found[-1].stop == len(partition.graph.layers)
    assert allowed.issuperset(each.start for each in found)
    assert set(partition.starts) <= {each.start for each in found}
    assert all(each.recompute for each in found[:-1])
    assert not found[-1].recompute  # its backward pass follows at once
    assert {each.start for each in found} == {*partition.starts, *block_cuts(partition.graph)}


def test_without_segments_a_stage_is_one() -> None:
    for policy in (ActivationPolicy(), ActivationPolicy("stage"), ActivationPolicy(offload="overlap")):
        assert [each.recompute for each in every(unet(3), policy)] == [False] * 3
        assert [each.start for each in every(unet(3), policy)] == list(unet(3).starts)


def test_chosen_runs_end_with_stages() -> None:
    graph = unet(1).graph
    places = cut_positions(graph)
    bounds = [(places[1], places[4]), (places[4], places[-3])]
    chosen = tuple((graph.layers[start].name, graph.layers[stop - 1].name) for start, stop in bounds)
    policy = ActivationPolicy("optimal", chosen)
    whole = every(unet(1), policy)
    assert [(each.start, each.stop) for each in whole if each.recompute] == bounds
    assert [each.recompute for each in whole] == [False, True, True, False]
    parts = [each for each in every(unet(3), policy) if each.recompute]
    cut = {place for start, stop in bounds for place in (start, stop)} | set(unet(3).starts[1:])
    assert {each.start for each in parts} | {each.stop for each in parts} == cut


def test_runs_that_are_not_in_the_model() -> None:
    partition = unet(1)
    last, first = partition.graph.layers[6].name, partition.graph.layers[2].name
    for run, message in [
        (("nowhere", last), "'nowhere' is to be recomputed and is no layer of the model: plan anew"),
        ((last, first), f"'{last}' to '{first}' cannot be recomputed alone: no cut may fall there; plan anew"),
    ]:
        with pytest.raises(ValueError, match=message):
            segments_of(partition, 0, ActivationPolicy("optimal", (run,)))
