"""Bytes of stages under a policy: against measured live bytes, against sums by hand, against those that keep all."""

from __future__ import annotations

import functools
import random

import pytest
import torch
from torch import Tensor

from parallel.comm.thread_comm import LocalCommunicator
from parallel.graph.layers import INPUT, OUTPUT, Layer, LayerGraph
from parallel.graph.partition import Partition, cut_positions, partition_equal
from parallel.memory.offload_window import HostBytes
from parallel.memory.policy import LEAST, ActivationPolicy, Segment, segments_of
from parallel.memory.rank_bytes import host_bytes
from parallel.memory.stage_bytes import StageBytes, StageMemory
from parallel.offload.live_bytes import LiveBytes
from parallel.offload.saved_tensors import SavedTensors
from parallel.schedule.passes import add_recompute
from parallel.schedule.registry import build_schedule, mesh_for
from parallel.stage.batchnorm import running_statistics
from parallel.stage.stage import Stage
from parallel.trace.cut import cut_stage
from parallel.trace.trace import Traced, trace
from tests.helpers.lanes import long_where
from tests.helpers.random_graphs import random_graph
from tests.parallel.memory.test_rank_bytes import net

CPU = torch.device("cpu")
KIB = 1024


def chain(*, twice: bool = False) -> LayerGraph:
    """Three layers. With ``twice``, b keeps what it gives, as c does."""
    storages = [((k, size),) for k, size in enumerate((100, 40, 60, 20))]
    saved = ((0, 100),), ((1, 40), *(((2, 60),) * twice)), ((2, 60), (9, 8))
    layers = [Layer("images", INPUT, (), output_bytes=100, differentiable=False, output_storages=storages[0])]
    for k, (name, size, parameters) in enumerate((("a", 40, 16), ("b", 60, 0), ("c", 20, 10)), 1):
        form = {"output_bytes": size, "param_bytes": parameters, "saved": saved[k - 1], "output_storages": storages[k]}
        layers.append(Layer(name, "work", (layers[-1].name,), **form))
    return LayerGraph((*layers, Layer("output", OUTPUT, ("c",), output_bytes=20, output_storages=storages[3])))


def only(graph: LayerGraph, policy: ActivationPolicy) -> StageBytes:
    return StageMemory(graph).of_stage(Partition(graph, (0,)), 0, policy)


def test_offload_by_hand() -> None:
    at_once = only(chain(), ActivationPolicy(offload="overlap", smallest=10))
    assert (at_once.activations, at_once.inputs) == (8, 0)  # c's mask is too small to move
    assert at_once.forward == 100 + 40 + 60  # while b runs; who runs the stage holds the images
    assert at_once.backward == (60 + 8) + (20 + 60) + 10  # c's: what it saved, gradients, those of its parameters
    window = only(chain(), ActivationPolicy(offload="overlap", smallest=10, ahead=50))
    assert window.activations == 8
    assert window.forward == at_once.forward  # a leaves when c keeps b, before c computes
    assert window.backward == at_once.backward + 40  # a is back ahead


def test_what_two_layers_keep_moves_once() -> None:
    graph, policy = chain(twice=True), ActivationPolicy(offload="overlap", smallest=0)
    (there,) = StageMemory(graph).host(Partition(graph, (0,)), policy)
    assert there == HostBytes(4 * LEAST, LEAST, 0)  # a buffer for each
    stage = only(graph, policy)
    assert (stage.activations, stage.forward, stage.backward) == (0, 200, 40 + 60 + (60 + 40))


def test_segments_by_hand() -> None:
    segments = [Segment(0, 3, True), Segment(3, 5, False)]
    arrays = StageMemory(chain()).arrays((0, 5))
    stage, _ = arrays.stage_bytes(segments)
    assert (stage.activations, stage.inputs) == (100 + 60 + 8, 100)
    assert stage.forward == 100 + 40 + 60
    assert stage.backward == 100 + (40 + 60) + 60  # b recomputed, with its gradient waiting
    assert stage.first_backward == stage.backward + 10
    both, there = arrays.stage_bytes(segments, ActivationPolicy("block", offload="overlap", smallest=0))
    assert (both.activations, both.forward, both.backward) == (0, 200, stage.backward)
    assert there == HostBytes(3 * LEAST, LEAST, 2 * LEAST)
    kept, plain = (arrays.stage_bytes([Segment(0, 4, False), Segment(4, 5, again)]) for again in (True, False))
    assert kept == plain  # what keeps nothing is not recomputed


@pytest.mark.parametrize("seed", range(6))
def test_bytes_that_are_remembered_are_those_worked_out_anew(seed: int) -> None:
    draw, graph = random.Random(seed), random_graph(seed, 24)
    memory, inner = StageMemory(graph), cut_positions(graph)
    for rule in list(RULES.values()) * 2:
        partition = Partition(graph, (0, *sorted(draw.sample(inner, draw.randint(0, len(inner))))))
        assert memory.kept(partition, rule) == StageMemory(graph).kept(partition, rule)
        assert memory.host(partition, rule) == StageMemory(graph).host(partition, rule)
    assert memory.kept(partition) == memory.kept(partition, ActivationPolicy("stage"))


def test_what_leaves_is_neither_lost_nor_counted_twice() -> None:
    moved = [ActivationPolicy(offload="overlap", smallest=0, ahead=n) for n in (0, 60, 10**6)]
    for seed in range(150):
        graph = random_graph(seed, most=12)
        partition, memory = Partition(graph, (0, 2)), StageMemory(graph)
        for stages in zip(*(memory.kept(partition, policy) for policy in (*moved, ActivationPolicy())), strict=True):
            assert not any(each.activations for each in stages[:3])
            for of in ("forward", "backward", "first_backward"):
                none, few, everything, plain = (getattr(each, of) for each in stages)
                assert none <= few <= plain, (seed, of)
                assert everything <= plain, (seed, of)


def test_the_host_holds_what_is_in_flight() -> None:
    stages = [HostBytes(10, 4, 3)] * 2

    def most(name: str, *, recompute: bool = False) -> list[int]:
        schedule = build_schedule(name, mesh_for(name, groups=1, depth=2), 4)
        return host_bytes(add_recompute(schedule) if recompute else schedule, stages)

    assert most("gpipe") == [43, 43]
    assert most("1f1b") == [23, 13]
    assert most("gpipe", recompute=True)[0] == 3 * 4 + 10 + 3
    halves = build_schedule("gpipe", mesh_for("gpipe", groups=1, depth=2), 2)
    assert host_bytes(halves, stages, [1.0, 0.5])[0] == 10 + 5 + 3


@functools.cache
def traced_net(name: str) -> tuple[Traced, tuple[int, ...]]:
    model, shape = net(name)
    return trace(model, shape), shape


RULES = {
    "none": ActivationPolicy(),
    "block": ActivationPolicy("block"),
    "offload": ActivationPolicy(offload="overlap", smallest=64 * KIB),
    "offload, ahead": ActivationPolicy(offload="overlap", smallest=0, ahead=512 * KIB),
    "block and offload": ActivationPolicy("block", offload="overlap", smallest=0),
    "block and offload, ahead": ActivationPolicy("block", offload="overlap", smallest=0, ahead=512 * KIB),
}


MEASURED = [("skips", 1, RULES["none"]), ("unet_w8", 1, RULES["none"])]
MEASURED += [(*net, rule) for net in (("skips", 2), ("unet_w8", 3)) for rule in RULES.values()]
LARGER = [("torchvision:resnet18", 2, rule) for rule in RULES.values()]


@pytest.mark.parametrize(("name", "stages", "rule"), long_where([*MEASURED, *LARGER], *LARGER))
def test_a_stage_takes_what_is_predicted(name: str, stages: int, rule: ActivationPolicy) -> None:
    traced, shape = traced_net(name)
    partition, memory = partition_equal(traced.graph, stages), StageMemory(traced.graph)
    traced.model.zero_grad()
    there = memory.host(partition, rule)
    values: dict[str, Tensor] = {partition.inputs_of(0)[0]: torch.randn(shape)}
    for number, told in enumerate(memory.kept(partition, rule)):
        module = cut_stage(traced, partition, number, segments_of(partition, number, rule)).train()
        statistics = running_statistics(module, LocalCommunicator(), "per-microbatch")
        saved_tensors = SavedTensors(rule, CPU)
        stage = Stage(module, CPU, statistics=statistics, saved_tensors=saved_tensors)
        statistics.begin_step(1)
        given = {key: values[key].detach().clone().requires_grad_(values[key].requires_grad) for key in module.inputs}
        watch = LiveBytes()
        watch.add(given.values())
        with watch:
            outputs = stage.forward(0, given, 0)
        del given
        forward = watch.peak_bytes
        values |= {key: out.detach().clone().requires_grad_(out.requires_grad) for key, out in outputs.items()}
        sizes = {key: out.shape for key, out in outputs.items() if out.requires_grad}
        del outputs
        stage.flush(0)
        kept = watch.peak_bytes = watch.bytes
        with watch:
            stage.backward(0, {key: [torch.ones(size)] for key, size in sizes.items()})
        # 10 KiB: the states of the random generators, of segments that draw.
        assert told.forward == pytest.approx(forward, rel=0.01, abs=12 * KIB), number
        assert told.activations == pytest.approx(kept, rel=0.01, abs=12 * KIB), number
        assert told.first_backward == pytest.approx(watch.peak_bytes, rel=0.08), number
        if saved_tensors.pool is not None:  # whose smallest buffers are of 4 KiB
            assert there[number].kept <= saved_tensors.pool.peak_bytes
            assert there[number].kept + there[number].again >= 0.9 * saved_tensors.pool.peak_bytes
