"""Forecasts of steps whose time can be worked out by hand; plans for devices that differ."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any

import pytest

from app.planning.command import PlanCommand
from app.planning.explained import unequal_notes
from app.planning.machine import devices_named, named_machine
from app.planning.report import report
from app.planning.workload import Workload
from app.settings.cli import OK
from parallel.cost.cluster import Cluster, LinkSpec
from parallel.cost.stage_cost import Costs, LayerCost, stage_costs
from parallel.graph.layers import INPUT, OUTPUT, Layer, LayerGraph
from parallel.graph.partition import Partition, partition_equal
from parallel.memory.liveness import storages
from parallel.memory.policy import MIB, ActivationPolicy, segments_of
from parallel.memory.rank_bytes import BUCKET_BYTES
from parallel.memory.stage_bytes import StageMemory
from parallel.plan.added_costs import moved_bytes, policy_costs
from parallel.plan.plan import PlanRow, best_of
from parallel.plan.search import Planner
from parallel.plan.stages import Task
from parallel.plan.step_time import ADDING_PASSES, UPDATE_PASSES, links_between, step_time
from parallel.schedule.timeline import LinkCost, StageCost
from parallel.strategy import Strategy

FAST = LinkSpec("fast", 1e30, 0.0)


def cluster(per_node: int = 8, lanes: float = 8, link: LinkSpec = FAST, update: float = 1e30) -> Cluster:
    return Cluster("test", 1 << 30, per_node, lanes, link, link, update)


def split(name: str, ranks: int, depth: int, m: int, on: Cluster, **more: Any) -> float:
    costs = [StageCost(1.0, 2.0, 1.0, 1.0, 10)] * depth
    links = {(stage, stage + 1): LinkCost(0.0, 0.0) for stage in range(depth - 1)}
    return step_time(Strategy(name, ranks, depth, m, **more), m, costs, links, [100] * depth, 2, on).step_s


HUNDRED = cluster(link=LinkSpec("100 bytes/s", 100.0, 0.0))
UPDATED, ADDED = cluster(update=UPDATE_PASSES[2] * 100.0), cluster(update=ADDING_PASSES * 100.0)
"""Devices that take a second to update a stage, and to add to its gradients."""
AGAIN, UPDATE_S = {"policy": ActivationPolicy("stage")}, UPDATE_PASSES[2] / ADDING_PASSES


@pytest.mark.parametrize(
    ("name", "ranks", "m", "on", "more", "seconds"),
    [
        ("gpipe", 2, 2, cluster(), {}, 9),
        ("gpipe", 2, 2, cluster(), AGAIN, 9 + 2),  # the last stage has just computed one of two
        ("mp-basic", 2, 1, cluster(), AGAIN, 6),
        ("gpipe", 2, 4, HUNDRED, {}, 15),
        # Two groups: the last stage is done a backward pass before the first, whose sum of 2 x 50 bytes is not hidden.
        ("gpipe", 4, 8, HUNDRED, {}, 15 + 1),
        ("gpipe", 2, 4, cluster(lanes=1), {}, 2 * 4 * 3),
        ("gpipe", 4, 8, cluster(per_node=4, lanes=2), {}, 2 * 4 * 3),  # each of two groups has a core
        ("gpipe", 2, 1, UPDATED, {}, 6 + 1),
        ("bidirectional", 2, 2, UPDATED, {}, 6 + 2),
        ("bidirectional", 2, 2, UPDATED, {"zero": 1}, 6 + 1),
        ("master", 2, 1, HUNDRED, {}, 6 + 1),  # the second replica has no microbatch
        ("mp-basic", 2, 4, ADDED, {}, 24 + 3 * 2 + UPDATE_S),  # three microbatches, two stages one after the other
    ],
)
def test_pipelines(name: str, ranks: int, m: int, on: Cluster, more: dict[str, Any], seconds: float) -> None:
    assert split(name, ranks, 2, m, on, **more) == pytest.approx(seconds)


def test_slices_take_as_many_messages_as_sums_of_whole_gradients() -> None:
    """Half of a ring sum scatters, the other half gathers; with stage 2 every microbatch scatters."""
    slow = dataclasses.replace(cluster(link=LinkSpec("100 bytes/s", 100.0, 0.0)), kind="cpu")
    whole, one, two = (split("bidirectional", 2, 2, 4, slow, zero=zero) for zero in (0, 1, 2))
    assert one == pytest.approx(whole + 0.5)  # a backward pass hides the sum of one stage of two, and no gather
    assert two == one  # inverted replicas sum once
    whole, one, two = (split("1f1b", 4, 2, 8, slow, zero=zero) for zero in (0, 1, 2))
    assert one == pytest.approx(whole)
    assert two == pytest.approx(whole + 3 * 0.5)  # with 4 microbatches on each rank


def whole(name: str, ranks: int, m: int, on: Cluster, batch: int = 8, params: int = 4 * BUCKET_BYTES) -> float:
    costs = [StageCost(1.0, 2.0, 1.0, 1.0, 10)]
    return step_time(Strategy(name, ranks, 1, m), batch, costs, {}, [params], 2, on).step_s


SLOW = LinkSpec("slow", 4 * BUCKET_BYTES, 0.0)
"""1 s for all gradients."""
BUSY = dataclasses.replace(cluster(), kind="cpu", sums=SLOW, beside_backward=1.5, gathering=4.0)


@pytest.mark.parametrize(
    ("seconds", "given"),
    [
        (12, ("single", 1, 4, cluster())),
        (6, ("ddp", 2, 4, cluster())),
        (12, ("ddp", 2, 4, cluster(lanes=1))),
        (6, ("ddp", 2, 3, cluster(), 3)),  # rank 0 has two of three microbatches
        (100 / 4 * 3, ("single", 1, 30, cluster(), 100)),  # 10 of 4 tiles, 20 of 3
        (12 + 3 + UPDATE_S, ("single", 1, 4, ADDED, 8, 100)),  # microbatches after the first add their gradients
        # Sums hide behind the backward pass but for the last bucket; gathering behind computing, scattering does not.
        (6 + 0.25, ("ddp", 2, 4, cluster(link=SLOW))),
        (6 + 0.5, ("fsdp", 2, 4, cluster(link=SLOW))),
        # On a CPU they hide behind nothing. Two microbatches gather twice each, and scatter their gradients.
        (6 + 1.5, ("ddp", 2, 4, BUSY)),
        (6 + 2 * (2 * 0.5 + 0.5) * 4, ("fsdp", 2, 4, BUSY)),
    ],
)
def test_whole_models(seconds: float, given: tuple[Any, ...]) -> None:
    assert whole(*given) == pytest.approx(seconds)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "master", "bidirectional", "zero-bubble", "mp-basic"])
def test_a_long_step_is_not_simulated_whole_and_takes_as_long(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("parallel.plan.step_time.LONG", 1000)
    whole = split(name, 4, 4, 60, cluster())
    monkeypatch.setattr("parallel.plan.step_time.LONG", 4)
    assert split(name, 4, 4, 60, cluster()) == pytest.approx(whole)


def test_a_long_step_whose_layers_are_not_estimated_takes_no_time() -> None:
    """Whole slides are planned for their bytes alone."""
    costs = [StageCost(0.0, 0.0, 0.0, 0.0, 0)]
    step = step_time(Strategy("single", 1, 1, 8), 8, costs, {}, [0], 2, cluster())
    assert (step.step_s, step.bubble) == (0, 0)


RUNS = (("x", "conv1"),)


def chain() -> LayerGraph:
    """x -> conv0 -> ... -> conv3: each keeps its input, 2 MiB, and ``conv3`` besides 1 KiB."""
    form = [{"output_bytes": 2 * MIB, "output_storages": ((n, 2 * MIB),)} for n in range(5)]
    found = [Layer("x", INPUT, (), differentiable=False, **form[0])]
    for n in range(4):
        saved = ((n, 2 * MIB), *(((9, 1024),) if n == 3 else ()))
        found.append(Layer(f"conv{n}", "Conv2d", (found[-1].name,), module=f"conv{n}", saved=saved, **form[n + 1]))
    return LayerGraph((*found, Layer("output", OUTPUT, (found[-1].name,), **form[4])))


GRAPH = chain()
COSTS = Costs((LayerCost(0, 0, 0), *[LayerCost(1.0, 2.0, 1.0)] * 4, LayerCost(0, 0, 0)), "test")


def cost(
    policy: ActivationPolicy, starts: tuple[int, ...] = (0,), copy_s: float = 0.0, beside: bool = False
) -> StageCost:
    """Of the first stage; ``copy_s`` of a piece."""
    partition = Partition(GRAPH, starts)
    bandwidth = 2 * MIB / copy_s if copy_s else math.inf
    given = stage_costs(partition, COSTS)
    how = {"copy_bandwidth": bandwidth, "overlapped": beside, "memory": StageMemory(GRAPH)}
    return policy_costs(partition, given, COSTS, policy, **how)[0]


def test_computing_again_is_part_of_the_backward_pass() -> None:
    assert cost(ActivationPolicy()) == stage_costs(Partition(GRAPH, (0,)), COSTS)[0]
    assert cost(ActivationPolicy("stage")).backward_s == 8  # an action of its own computes again
    found = cost(ActivationPolicy("optimal", RUNS))
    assert (found.forward_s, found.backward_s, found.backward_input_s) == (4, 8 + 2, 4 + 2)
    assert cost(ActivationPolicy("block")).backward_s == 8 + 3  # what is last is kept
    assert cost(ActivationPolicy("optimal", (("conv2", "conv2"),)), starts=(0, 3)).backward_s == 4  # of another stage


def moved(policy: ActivationPolicy, starts: tuple[int, ...] = (0,)) -> tuple[int, int]:
    return moved_bytes(storages(GRAPH), segments_of(Partition(GRAPH, starts), 0, policy), policy)


def test_what_is_moved() -> None:
    everything = ActivationPolicy(offload="overlap")
    assert moved(everything) == (8 * MIB, 0)  # without what is small
    assert moved(everything, (0, 3)) == (4 * MIB, 0)
    assert moved(ActivationPolicy(offload="overlap", smallest=1)) == (8 * MIB + 1024, 0)
    # The model's input enters the run, conv2 and conv3 keep what they are given; conv1's input is made again.
    assert moved(ActivationPolicy("optimal", RUNS, "overlap")) == (6 * MIB, 2 * MIB)
    assert moved(ActivationPolicy("stage", offload="overlap"), (0, 3)) == (2 * MIB, 2 * MIB)


def test_copies_on_a_cpu_are_added() -> None:
    found = cost(ActivationPolicy(offload="overlap"), copy_s=0.5)
    assert (found.forward_s, found.backward_s) == (4 + 2, 8 + 2)
    again = cost(ActivationPolicy("optimal", RUNS, "overlap"), copy_s=0.5)
    assert (again.forward_s, again.backward_s) == (4 + 1.5, 8 + 2 + 1.5 + 1)


@pytest.mark.parametrize(("copy_s", "expected"), [(0.5, (4, 8)), (1.0, (4, 8)), (1.5, (6, 8)), (3.0, (12, 12))])
def test_copies_beside_a_gpu_count_where_they_take_longer(copy_s: float, expected: tuple[float, float]) -> None:
    found = cost(ActivationPolicy(offload="overlap"), copy_s=copy_s, beside=True)
    assert (found.forward_s, found.backward_s) == expected


def test_parameters_of_a_module_that_is_called_again_are_updated_once() -> None:
    first, *convs, last = GRAPH.layers
    shared = [dataclasses.replace(each, module="conv", param_bytes=100) for each in convs]
    task = Task(LayerGraph((first, *shared, last)), lambda tiles: COSTS, 1, 2)
    row = Planner(task, UPDATED).forecast(Strategy("single", 1, 1, 1))
    assert row.step_s == pytest.approx(4 * 3 + 1)


MIXED = "rtxa6000-48gb:2,rtx2080ti-11gb:2"


def planner(device: str, ranks: int, batch: int = 32) -> Planner:
    work, machine = Workload("resnet18", 256, 2, "batch", False, "sgd", None, "average"), named_machine(device, ranks)
    task = work.task(batch, machine.estimate)
    return Planner(task, dataclasses.replace(machine.cluster, speeds=machine.speeds(work.in_float32)))


def test_shares_by_speed_make_the_step_of_the_formula() -> None:
    mixed = planner(MIXED, 4)
    fast, slow = mixed.cluster.speeds[0], mixed.cluster.speeds[3]
    assert mixed.cluster.speeds == (fast, fast, 1.0, 1.0)
    assert 1.2 < fast < 3
    rows = list(mixed.search(["ddp"], ranks=4, m=32))
    equal, shared = rows
    assert [len(share) for share in shared.strategy.shares] == [10, 10, 6, 6]
    alone = planner("rtx2080ti-11gb", 1).forecast(Strategy("single", 1, 1, 32))
    each_s = alone.step_s / 32
    assert equal.step_s - shared.step_s == pytest.approx((8 / slow - max(10 / fast, 6)) * each_s, rel=0.05)
    assert best_of(rows) is shared


def test_a_slower_device_may_come_first() -> None:
    """The fullest group's microbatches had the weights of the first one's, of which there are fewer: IndexError."""
    devices = "rtxa6000-48gb", "rtx2080ti-11gb"
    (_, ahead), (_, behind) = (
        planner(",".join(order), 2).search(["ddp"], ranks=2, m=8) for order in (devices, devices[::-1])
    )
    counts = [len(share) for share in behind.strategy.shares]
    assert counts[0] < counts[1]
    assert counts[::-1] == [len(share) for share in ahead.strategy.shares]
    assert behind.peak_bytes == ahead.peak_bytes
    assert behind.step_s == pytest.approx(ahead.step_s, rel=0.01)


def test_a_link_is_the_slowest_of_those_of_all_groups() -> None:
    """Of 24 ranks, eight a node, a group of six lies on one node, another on two."""
    mixed, slow = planner("v100-16gb", 24), LinkSpec("slow", 1.0, 0.0)
    cluster = dataclasses.replace(mixed.cluster, per_node=8, between=slow)
    partition = partition_equal(mixed.task.graph, 6)
    one, four = (links_between(Strategy("1f1b", ranks, 6, 32), partition, cluster) for ranks in (6, 24))
    assert one[1, 2].forward_s < 1 < four[1, 2].forward_s
    assert one[0, 1].forward_s == four[0, 1].forward_s


def test_stages_follow_the_speeds_of_their_ranks() -> None:
    mixed = planner("rtxa6000-48gb,rtx2080ti-11gb", 2)
    candidate = Strategy("1f1b", 2, 2, 16)
    uneven = mixed.forecast(candidate)
    costs = mixed.stages.stage_costs(uneven.strategy, mixed.partition_of(uneven))
    first, second = (cost.forward_s + cost.backward_s for cost in costs)
    fast = mixed.cluster.speeds[0]
    assert first / fast == pytest.approx(second, rel=0.25), "the first device takes more of the model"
    equal_speeds = Planner(mixed.task, dataclasses.replace(mixed.cluster, speeds=()))
    cut_alike = equal_speeds.forecast(candidate)
    as_cut = mixed.forecast(candidate, partition=equal_speeds.partition_of(cut_alike))
    assert uneven.images_per_second > 1.1 * as_cut.images_per_second
    assert partition_equal(mixed.task.graph, 2).starts != mixed.partition_of(uneven).starts


@pytest.mark.parametrize("name", ["master", "bidirectional"])
def test_shares_by_speed_leave_work_for_both_replicas_of_a_group(name: str) -> None:
    """Shares of 3 and 1 microbatches were timed, where the second replica of the slower group has none: KeyError."""
    mixed = planner("h100-80gb:2,rtx2080ti-11gb:2", 4, batch=8)
    rows = list(mixed.search([name], ranks=4, depth=2))
    assert rows
    assert all(len(share) >= 2 for row in rows for share in row.strategy.shares)


def test_groups_of_unequal_devices_share_by_speed() -> None:
    mixed = planner(MIXED, 4)
    rows = list(mixed.search(["gpipe"], ranks=4, depth=2, m=16))
    equal, shared = rows
    assert [len(share) for share in shared.strategy.shares] == [10, 6]
    assert shared.images_per_second > equal.images_per_second
    assert 0 <= shared.bubble < 1
    assert PlanRow.from_json(shared.to_json()).strategy == shared.strategy


@pytest.mark.parametrize(
    ("text", "ranks", "said"),
    [
        (MIXED, 3, "names 4 devices, one a rank: give --ranks 4"),
        ("a40-48gb:x", 2, "names devices as a40-48gb:2,t4-16gb:2; got a40-48gb:x"),
        ("a40-48gb:1,t5-16gb:1", 2, "'t5-16gb' is no device whose data sheet is known; close are t4-16gb"),
    ],
)
def test_devices_that_are_refused(text: str, ranks: int, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        devices_named(text, ranks)


def test_slow_devices_are_advised_against_where_they_add_little() -> None:
    row = PlanRow(Strategy("ddp", 2, 1, 8, shares=((0, 1, 2, 3, 4, 5, 6), (7,))), images_per_second=10.2, step_s=1.0)
    equal = PlanRow(Strategy("ddp", 2, 1, 8), images_per_second=6.0, step_s=1.0)
    notes = [list(unequal_notes(["fast", "slow"], [7.0, 1.0], [equal, row], lambda _, n=n: n)) for n in (10.0, 8.0)]
    speeds, shares, advice = notes[0]
    assert speeds == "speeds: 1 x fast 7.00, 1 x slow 1.00"
    assert all(words in shares for words in ("--shares 7,1: 10.2 images/s", "1.70 times", "within 12%"))
    assert re.match("without 1 x slow: 10 images/s.*leave them out", advice)
    assert notes[1][-1].endswith("they add 27%")


def test_a_processor_beside_fast_gpus_is_advised_against(capsys: pytest.CaptureFixture[str]) -> None:
    command = PlanCommand("resnet18", 256, ranks=3, batch=48, parallel="ddp", device_spec="h100-80gb:2,epyc7742-64c:1")
    assert report(command) == OK
    said = capsys.readouterr().out
    assert "1 x epyc7742-64c 1.00" in said
    assert "without 1 x epyc7742-64c" in said
    assert said.rstrip().endswith("leave them out")
