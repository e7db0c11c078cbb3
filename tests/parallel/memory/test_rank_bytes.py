"""Bytes of stages and ranks: against the matrices of all windows, against formulas."""

from __future__ import annotations

import dataclasses
import functools
import random
import statistics
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.registry import build_model
from parallel.graph.layers import LayerGraph
from parallel.graph.partition import Partition, cut_positions, partition_equal
from parallel.memory.rank_bytes import BUCKET_BYTES, RankBytes, in_flight, rank_bytes, sharded_bytes
from parallel.memory.stage_bytes import StageBytes
from parallel.memory.stage_memory import StageMemory
from parallel.memory.windows import Windows
from parallel.offload.live_bytes import LiveBytes
from parallel.schedule.passes import add_recompute, lower
from parallel.schedule.registry import SCHEDULES, build_schedule, mesh_for
from parallel.strategy import Strategy
from parallel.trace.trace import trace
from tests.helpers.lanes import long_where
from tests.helpers.random_graphs import kept_bytes, random_graph
from tests.helpers.small_nets import SkipNet


def stage_bytes(partition: Partition) -> list[StageBytes]:
    return StageMemory(partition.graph).kept(partition)


class WithLoss(nn.Module):
    def __init__(self, model: nn.Module, loss: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, images: Tensor) -> Tensor:
        return self.loss(self.model(images))


def net(name: str) -> tuple[nn.Module, tuple[int, ...]]:
    if name == "skips":
        return WithLoss(SkipNet(), lambda out: F.log_softmax(out, 1).mean()), (2, 3, 64, 64)
    model = build_model(name, classes=3)
    return WithLoss(model, lambda out: F.log_softmax(out, 1).mean()), (1, 3, 64, 64)


@functools.cache
def resnet50() -> LayerGraph:
    return trace(*net("resnet50")).graph


@pytest.mark.parametrize("name", long_where(["unet_w8", "resnet50"], "resnet50"))
def test_windows_agree_with_stages(name: str) -> None:
    model, shape = net(name)
    graph = trace(model, shape).graph
    windows = Windows(graph, [1.0] * len(graph.layers))
    draw = random.Random(0)
    deviations = []
    for _ in range(60):
        i, j = sorted(draw.sample(range(len(windows)), 2))
        stage = StageMemory(graph).of_layers((windows.positions[i], windows.positions[j]))
        assert stage.activations == windows.kept_bytes[i, j]
        assert stage.inputs == windows.entered_bytes[i, j]
        assert stage.parameters == windows.param_bytes[i, j]
        assert (stage.received, stage.returned) == (windows.received_bytes[i, j], windows.returned_bytes[i, j])
        if j - i > len(windows) // 8:  # as a stage may be
            deviations.append(windows.peak_bytes[i, j] / max(stage.forward, stage.backward) - 1)
    assert abs(statistics.median(deviations)) < 0.02
    assert -0.15 < min(deviations) <= max(deviations) < 0.4, (min(deviations), max(deviations))


MATRICES = (
    "seconds",
    "param_bytes",
    "received_bytes",
    "returned_bytes",
    "entered_bytes",
    "kept_bytes",
    "peak_bytes",
)


@pytest.mark.parametrize("seed", range(10))
def test_windows_among_some_places_are_those_of_these_places(seed: int) -> None:
    graph = random_graph(seed)
    places = [0, *cut_positions(graph), len(graph.layers)]
    some = [0, *places[1:-1:2], len(graph.layers)]
    seconds = [1.0 + k for k in range(len(graph.layers))]
    among, alone = Windows(graph, seconds, places).among(some), Windows(graph, seconds, some)
    assert among.positions == alone.positions
    assert len(among) == len(alone)
    above = np.triu_indices(len(some), 1)
    for name in MATRICES:
        assert (getattr(among, name)[above] == getattr(alone, name)[above]).all(), name


def test_what_stages_keep_is_counted_as_plainly_as_can_be() -> None:
    for seed in range(100):
        graph = random_graph(seed)
        cuts = random.Random(seed).sample(range(2, len(graph.layers) - 1), 2) if len(graph.layers) > 5 else []
        starts = (0, *sorted(cuts))
        for start, stage in zip(starts, stage_bytes(Partition(graph, starts)), strict=True):
            stop = min([cut for cut in cuts if cut > start], default=len(graph.layers))
            assert stage.activations == kept_bytes(graph, start, stop)
            assert stage.activations <= min(stage.forward, stage.backward)


def test_formulas_of_microbatches_in_flight() -> None:
    def flights(name: str, depth: int, m: int) -> list[set[tuple[int, ...]]]:
        mesh = mesh_for(name, groups=1, depth=depth)
        return [set(one) for one in in_flight(build_schedule(name, mesh, m), mesh)]

    assert flights("gpipe", 3, 4) == [{(4,)}] * 3
    assert flights("1f1b", 3, 4) == [{(3,)}, {(2,)}, {(1,)}]
    assert flights("zero-bubble", 3, 6)[2] == {(3,)}
    assert flights("master", 4, 4) == [{(1, 0), (0, 1)}] * 4
    assert flights("master", 3, 4)[1] == {(1,)}


@pytest.mark.parametrize("name", list(SCHEDULES))
def test_ranks_of_every_schedule(name: str) -> None:
    graph = resnet50()
    mesh = mesh_for(name, groups=1, depth=2, chunks=2 if SCHEDULES[name].chunks else 1)
    partition = partition_equal(graph, mesh.stages)
    schedule = build_schedule(name, mesh, 2 if name == "mast" else 4)
    lowered = lower(schedule, mesh, partition.links)
    ranks = rank_bytes(stage_bytes(partition), mesh, schedule, slots=2)
    assert ranks == rank_bytes(stage_bytes(partition), mesh, lowered, slots=2)
    stages = stage_bytes(partition)
    for rank, found in enumerate(ranks):
        held = {stage for stage, _ in mesh.held_by(rank)}
        assert found.parameters == sum(stages[stage].parameters for stage in held)
        assert found.optimizer == 2 * found.parameters
        most = max(stages[stage].activations for stage in held)
        assert found.total >= found.parameters * 3 + most
    half = [
        rank_bytes(stage_bytes(partition), mesh, schedule, slots=2, weights=[w] * 4)[0].activations for w in (1.0, 0.5)
    ]
    assert half[1] <= half[0]
    again = rank_bytes(stage_bytes(partition), mesh, add_recompute(schedule), slots=2)
    assert sum(rank.total for rank in again) <= sum(rank.total for rank in ranks)


def test_versions_of_the_weights_are_counted() -> None:
    """D - k of rank k, gradients of one minibatch, and the update while other minibatches are in flight."""
    mesh = mesh_for("pipedream", groups=1, depth=3)
    partition, schedule = partition_equal(resnet50(), 3), build_schedule("pipedream", mesh, 8)
    stages = stage_bytes(partition)
    plain = rank_bytes(stages, mesh, build_schedule("1f1b", mesh, 8), slots=2)
    for k, (found, of_1f1b) in enumerate(zip(rank_bytes(stages, mesh, schedule, slots=2), plain, strict=True)):
        own = stages[k].parameters
        assert (found.parameters, found.optimizer) == ((3 - k) * own, 2 * own)
        assert found.gradients <= own
        assert (2 - k) * own - own <= found.total - of_1f1b.total <= (2 - k) * own + stages[k].largest_parameter
        least = (3 - k) * own + own + 2 * own + (2 - k) * stages[k].activations  # at an update
        assert found.total >= least


@pytest.mark.parametrize("groups", [1, 3])
def test_holders_of_a_stage_keep_equal_slices_of_the_optimizer(groups: int) -> None:
    graph = resnet50()
    mesh = mesh_for("master", groups=1, depth=2)
    partition, schedule = partition_equal(graph, 2), build_schedule("master", mesh, 2)
    stages = stage_bytes(partition)
    whole, divided = (rank_bytes(stages, mesh, schedule, slots=2, zero=zero, copies=groups) for zero in (0, 1))
    assert [rank.optimizer for rank in whole] == [2 * (stages[0].parameters + stages[1].parameters)] * 2
    slices = [-(-stage.parameters // (2 * groups)) for stage in stages]
    assert [rank.optimizer for rank in divided] == [2 * sum(slices)] * 2


def test_whole_models() -> None:
    graph = resnet50()
    size = StageMemory(graph).of_layers((0, len(graph.layers))).parameters

    def taken(name: str, ranks: int, m: int, slots: int = 0) -> RankBytes:
        strategy, stage = Strategy(name, ranks, 1, m), StageMemory(graph).of_layers((0, len(graph.layers)))
        if name == "fsdp":
            return sharded_bytes(stage, ranks, several=m > ranks, slots=slots)
        return rank_bytes([stage], strategy.mesh, strategy.schedule({}), slots=slots)[0]

    assert taken("single", 1, 2).total >= taken("single", 1, 1).total
    # Buckets hold all gradients from the beginning, and later microbatches add to them.
    assert 0 < taken("ddp", 2, 2).total - taken("single", 1, 1).total <= size
    assert taken("ddp", 2, 4).total == taken("ddp", 2, 2).total == taken("single", 1, 2).total
    sharded = taken("fsdp", 4, 8, slots=2)
    assert sharded.parameters == sharded.gradients == -(-size // 4)
    assert sharded.optimizer == 2 * sharded.parameters


@pytest.mark.parametrize(
    ("make", "slots"),
    [
        (functools.partial(torch.optim.AdamW, weight_decay=1e-4), 2),
        (functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=1e-4), 1),
    ],
    ids=["adamw", "sgd"],
)
def test_an_update_takes_copies_of_the_largest_parameter(
    make: Callable[..., torch.optim.Optimizer], slots: int
) -> None:
    model = WithLoss(nn.Sequential(nn.Linear(4, 64), nn.Linear(64, 512), nn.Linear(512, 4)), torch.mean)
    strategy, stages = Strategy("single", 1, 1, 1), stage_bytes(Partition(trace(model, (1, 4)).graph, (0,)))
    (told,) = rank_bytes(stages, strategy.mesh, strategy.schedule({}), slots=slots)
    optimizer, watch = make(model.parameters()), LiveBytes()
    watch.add(model.parameters())
    for _ in range(2):
        with watch:
            model(torch.ones(1, 4)).backward()
            optimizer.step()
        optimizer.zero_grad()
    assert told.transient == slots * 64 * 512 * 4
    assert told.total == pytest.approx(watch.peak_bytes, rel=0.02)


def test_a_rank_works_out_the_update_of_what_it_updates_or_gathers() -> None:
    graph, mesh = resnet50(), mesh_for("master", groups=1, depth=2)
    partition, schedule = partition_equal(graph, 2), build_schedule("master", mesh, 2)
    first, last = (stage.largest_parameter for stage in stage_bytes(partition))
    assert first < last == max(p.numel() for p in build_model("resnet50", classes=3).parameters()) * 4
    bare = [dataclasses.replace(stage, backward=0, first_backward=0, forward=0) for stage in stage_bytes(partition)]
    ranks = rank_bytes(bare, mesh, schedule, slots=2)
    assert [rank.transient for rank in ranks] == [2 * last, 2 * last]
    (whole,) = stage_bytes(partition_equal(graph, 1))
    of_ddp = Strategy("ddp", 4, 1, 4).mesh
    passes = dataclasses.replace(whole, backward=0, first_backward=0, forward=0)
    rank = rank_bytes([passes], of_ddp, {0: build_schedule("ddp", of_ddp, 4)[0]}, slots=2, zero=2)[0]
    own, bucket = -(-whole.parameters // 4), max(BUCKET_BYTES, last)
    assert (rank.gradients, rank.optimizer) == (own, 2 * own)
    assert rank.transient == bucket + own * bucket // whole.parameters  # a bucket of new parameters, and its slice


@pytest.mark.parametrize("zero", [1, 2])
def test_a_stage_without_parameters_has_none_to_gather(zero: int) -> None:
    """Their slice was divided by their bytes: ZeroDivisionError in plans of deep pipelines."""
    mesh, schedule = mesh_for("1f1b", groups=2, depth=2), build_schedule("1f1b", mesh_for("1f1b", groups=2, depth=2), 8)
    first, last = stage_bytes(partition_equal(resnet50(), 2))
    bare = dataclasses.replace(first, parameters=0, largest_parameter=0)
    rank, *_ = rank_bytes([bare, last], mesh, schedule, slots=2, zero=zero)
    assert (rank.parameters, rank.gradients, rank.optimizer) == (0, 0, 0)
    assert rank.total > 0
