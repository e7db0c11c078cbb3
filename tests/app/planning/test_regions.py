"""Plans are made of a model and its loss as a planner sees them, and of the way that is needed at each side."""

import functools
import itertools
from xml.etree import ElementTree

import pytest
import torch

from app.planning.command import PlanCommand
from app.planning.regions import LIMITS, MemoryCurve, branches, memory_curves, regions, write_regions
from app.planning.report import machine_of, planner_for, workload_of
from app.planning.workload import Workload
from models.losses import PixelClassLoss, TileClassLoss
from parallel.cost.stage_cost import Costs, LayerCost
from parallel.offload.packing import ActivationMeter
from parallel.trace.trace import trace

GIB, CLASSES = 1 << 30, 5
COSTS = Costs((LayerCost(1, 2, 1),), "test")
CURVES = [
    MemoryCurve("ddp", 0, ((512, 4 * GIB), (1024, 16 * GIB), (2048, 64 * GIB))),
    MemoryCurve("ddp, recomputed", 0, ((512, GIB), (1024, 4 * GIB), (2048, 16 * GIB)), faint=True),
    MemoryCurve("1f1b", 1, ((512, 2 * GIB), (1024, 8 * GIB), (2048, 32 * GIB))),
    MemoryCurve("boxes", 2, ((1024, GIB), (2048, GIB))),
]


@pytest.mark.parametrize(("model", "loss"), [("resnet18", TileClassLoss()), ("unet_w4", PixelClassLoss())])
def test_model_and_loss_keep_what_is_predicted(model, loss):
    graph = Workload(model, 64, CLASSES).in_float32
    net = Workload(model, 64, CLASSES).build().to_empty(device="cpu")
    for tensor in (*net.parameters(), *net.buffers()):
        tensor.data.zero_()
    meter = ActivationMeter()
    targets = torch.zeros((1, 64, 64), dtype=torch.uint8) if model == "unet_w4" else torch.zeros(1, dtype=torch.int64)
    with meter.watching((*net.parameters(), *net.buffers())):
        value = loss(net(torch.zeros(1, 3, 64, 64)), targets)
    assert value.requires_grad
    kept = sum(dict(entry for layer in graph.layers for entry in layer.saved).values())
    assert kept == pytest.approx(meter.bytes, rel=0.001)


def test_the_loss_is_the_last_layers():
    plain, masks = (Workload("unet_w4", 64, CLASSES, segments=s).in_float32.layers[-1] for s in (None, True))
    assert plain == masks
    assert any("log_softmax" in op.name for op in masks.ops)
    assert sum(size for _, size in masks.saved) > 64 * 64 * CLASSES * 4


def test_a_task_and_a_model_that_is_unknown():
    task = Workload("resnet11_v2", 64, CLASSES, optimizer="sgd").task(4, lambda _: lambda tiles: COSTS)
    assert (task.batch, task.slots, dict(task.refused)) == (4, 1, {})
    assert task.estimate(1) is COSTS
    with pytest.raises(ValueError, match="did you mean"):
        Workload("resnet5O", 64, CLASSES).task(4, lambda _: lambda tiles: COSTS)


def drop_rates(classes: int) -> torch.nn.Module:
    rate = float(torch.linspace(0, 0.2, 3).numpy()[1])
    return torch.nn.Sequential(torch.nn.Conv2d(3, classes, 3), torch.nn.Dropout(rate))


def test_a_factory_that_turns_numbers_into_an_array_is_planned():
    net = Workload("tests.app.planning.test_regions:drop_rates", 64, CLASSES).build()
    assert net[1].p == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("model", "autocast"),
    [
        ("resnet11_v2", torch.bfloat16),
        pytest.param("unet_w4", torch.bfloat16, marks=pytest.mark.long),
        pytest.param("torchvision:densenet121", None, marks=pytest.mark.long),
    ],
)
def test_tiles_of_another_side_give_the_graph_of_a_model_that_is_followed_anew(model, autocast):
    seen = []

    def estimate(graph):
        seen.append(graph)
        return lambda tiles: COSTS

    first = Workload(model, 64, CLASSES, autocast=autocast)
    first.task(1, estimate)
    ours, anew = (work.task(1, estimate) for work in (first.at(96), Workload(model, 96, CLASSES, autocast=autocast)))
    assert ours.graph == anew.graph
    assert (ours.graph.classes, ours.graph.whole) == (anew.graph.classes, anew.graph.whole)
    assert seen[1] == seen[2] != seen[0]
    again = first.at(96)
    assert again._with_loss(trace(again.build(), (1, 3, 96, 96), autocast=autocast)) == ours.graph


@pytest.mark.parametrize("model", ["resnet11_v2", pytest.param("unet_w4", marks=pytest.mark.long)])
def test_some_sides_tell_the_graphs_of_those_between(model, monkeypatch):
    def graph_at(work):
        return work.task(1, lambda graph: lambda tiles: COSTS).graph

    work = Workload(model, 1024, CLASSES)
    for side in (1024, 512, 256, 128, 64, 2048):
        graph_at(work.at(side))
    anew = graph_at(Workload(model, 320, CLASSES))
    monkeypatch.delattr("app.planning.workload.run_again")
    assert graph_at(work.at(320)) == anew


@functools.cache
def planners(ranks):
    command = PlanCommand(model="resnet18", tile=512, ranks=ranks, batch=4, device_spec="v100-16gb")
    machine = machine_of(command)
    work = workload_of(command, machine)
    return functools.cache(lambda tile: planner_for(command, machine, work.at(tile)))


def test_each_region_begins_where_the_way_before_it_ends():
    """Bytes between two sides are in proportion to the px."""
    ddp, *_, boxes = CURVES
    assert ddp.reach(16 * GIB) == 1024
    assert ddp.reach(40 * GIB) == pytest.approx((1024**2 + 0.5 * (2048**2 - 1024**2)) ** 0.5)
    assert ddp.reach(GIB) == 0
    assert ddp.reach(100 * GIB) == boxes.reach(2 * GIB) == 2048
    found = regions(CURVES, 16 * GIB)
    assert found[0] == (0, 512, 1024)  # recomputation moves no region
    assert [family for family, _, _ in found] == [0, 1, 2]
    assert all(before[2] == after[1] for before, after in itertools.pairwise(found))
    assert [family for family, _, _ in regions(CURVES, 2 * GIB)] == [2]
    assert regions(CURVES, GIB // 2) == []


def test_splits_and_boxes_reach_further_than_data_parallelism():
    curves = {curve.name: curve for curve in memory_curves(planners(4), 4)}
    assert list(curves) == ["ddp", "ddp, recomputed by blocks", "1f1b", "master", "spatial", "ddp in boxes of 512 px"]
    for curve in curves.values():
        sizes = [size for _, size in curve.points]
        assert sizes == sorted(sizes) or max(sizes) < 1.1 * min(sizes)  # boxes take as much at any side
    reach = {name: curve.reach(LIMITS[0]) for name, curve in curves.items()}
    assert reach["ddp"] < reach["ddp, recomputed by blocks"]
    assert reach["ddp"] < reach["master"]  # 1f1b holds several microbatches of its first stage
    assert reach["ddp"] < reach["spatial"] < reach["ddp in boxes of 512 px"]


@pytest.mark.parametrize(("model", "count"), [("torchvision:vgg11", 1), ("resnet18", 1), ("torchvision:googlenet", 4)])
def test_branches(model, count):
    assert branches(Workload(model, 64, CLASSES).in_float32) == count


def texts(path):
    return " ".join(ElementTree.parse(path).getroot().itertext())


def test_pictures_and_a_line_for_each_device(tmp_path):
    lines = list(write_regions(tmp_path, planners(2), model="resnet18", tile=512, ranks=2))
    assert [line.split(" a device")[0] for line in lines] == ["16 GiB", "32 GiB", "80 GiB"]
    assert all("data parallelism to" in line and "splitting to" in line for line in lines)
    assert {path.name for path in tmp_path.iterdir()} == {"memory.svg", "map.svg"}
    said = texts(tmp_path / "memory.svg")
    for words in ("resnet18", "2 ranks", "splitting: 1f1b", "splitting: spatial", "streaming: ", "80 GiB", "2048"):
        assert words in said
    said = texts(tmp_path / "map.svg")
    for words in ("resnet18: 11.2 million, 1", "in-core", "out-of-core", "fits 16 GiB below", "branches", "512 px"):
        assert words in said
    ddp, *_ = memory_curves(planners(2), 2)
    planner = planners(2)(1024)
    row = planner.smallest_memory("ddp", 2)
    assert dict(ddp.points)[1024] == planner.cluster.needed_bytes(max(row.peak_bytes))


def test_one_rank_has_no_splits(tmp_path):
    lines = list(write_regions(tmp_path, planners(1), model="resnet18", tile=512, ranks=1))
    assert not any("splitting" in line for line in lines)
    assert "splitting" not in texts(tmp_path / "memory.svg")
