"""What a planner is told of a model and its loss: what really is kept, and whether classes are of pixels."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from app.planning.workload import Workload
from models.losses import PixelClassLoss, TileClassLoss
from parallel.cost.stage_cost import Costs, LayerCost
from parallel.graph.layers import LayerGraph
from parallel.offload.packing import ActivationMeter

CLASSES = 5


def kept(graph: LayerGraph) -> int:
    return sum(dict(entry for layer in graph.layers for entry in layer.saved).values())


@pytest.mark.parametrize(("model", "loss"), [("resnet18", TileClassLoss()), ("unet_w4", PixelClassLoss())])
def test_model_and_loss_keep_what_is_predicted(model: str, loss: nn.Module) -> None:
    graph = Workload(model, 64, CLASSES).trace()
    net = Workload(model, 64, CLASSES).build().to_empty(device="cpu")
    for tensor in (*net.parameters(), *net.buffers()):
        tensor.data.zero_()
    meter = ActivationMeter(net)
    targets = torch.zeros((1, 64, 64), dtype=torch.uint8) if model == "unet_w4" else torch.zeros(1, dtype=torch.int64)
    with meter.watching():
        value: Tensor = loss(net(torch.zeros(1, 3, 64, 64)), targets)
    assert value.requires_grad
    assert kept(graph) == pytest.approx(meter.bytes, rel=0.001)


def test_the_loss_is_the_last_layers() -> None:
    plain, masks = (Workload("unet_w4", 64, CLASSES, segments=s).trace().layers[-1] for s in (None, True))
    assert plain == masks
    assert any("log_softmax" in op.name for op in masks.ops)
    assert sum(size for _, size in masks.saved) > 64 * 64 * CLASSES * 4


def test_a_task() -> None:
    costs = Costs((LayerCost(1, 2, 1),), "test")
    task = Workload("resnet11_v2", 64, CLASSES, optimizer="sgd").task(4, lambda _: lambda tiles: costs)
    assert (task.batch, task.slots, dict(task.refused)) == (4, 1, {})
    assert task.estimate(1) is costs


def test_unknown_models_are_refused() -> None:
    with pytest.raises(ValueError, match="did you mean"):
        Workload("resnet5O", 64, CLASSES).trace()


@pytest.mark.parametrize(
    ("model", "autocast"),
    [
        ("resnet11_v2", None),
        ("resnet11_v2", torch.bfloat16),
        ("unet_w4", torch.bfloat16),
        pytest.param("torchvision:densenet121", None, marks=pytest.mark.long),
    ],
)
def test_tiles_of_another_side_give_the_graph_of_a_model_that_is_followed_anew(
    model: str, autocast: torch.dtype | None
) -> None:
    costs = Costs((LayerCost(1, 2, 1),), "test")
    seen: list[LayerGraph] = []

    def estimate(graph: LayerGraph) -> Callable[[int], Costs]:
        seen.append(graph)
        return lambda tiles: costs

    first = Workload(model, 64, CLASSES, autocast=autocast)
    first.task(1, estimate)
    ours, anew = (work.task(1, estimate) for work in (first.at(96), Workload(model, 96, CLASSES, autocast=autocast)))
    assert ours.graph == anew.graph
    assert (ours.graph.classes, ours.graph.whole) == (anew.graph.classes, anew.graph.whole)
    assert seen[1] == seen[2] != seen[0]
    assert first.at(96).trace(autocast) == ours.graph


@pytest.mark.parametrize("model", ["resnet11_v2", "unet_w4"])
def test_some_sides_tell_the_graphs_of_those_between(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    costs = Costs((LayerCost(1, 2, 1),), "test")

    def graph_at(work: Workload) -> LayerGraph:
        return work.task(1, lambda graph: lambda tiles: costs).graph

    work = Workload(model, 1024, CLASSES)
    for side in (1024, 512, 256, 128, 64, 2048):
        graph_at(work.at(side))
    anew = graph_at(Workload(model, 320, CLASSES))
    monkeypatch.delattr("app.planning.workload.run_again")
    assert graph_at(work.at(320)) == anew
