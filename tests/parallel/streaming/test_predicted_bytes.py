"""Bytes of a streamed step: recorded once for steps that compute alike, and predicted before anything is computed."""

from __future__ import annotations

import pytest
import torch

from app.planning.workload import Workload
from benchmarks.in_boxes import planned_regions, streamed
from models.registry import build_model
from parallel.offload.live_bytes import LiveBytes
from parallel.space.boxes import Boxes, _whole_tile_bytes
from parallel.streaming import step_record
from parallel.streaming.step_record import record
from parallel.team.boxed_nodes import PlannedRegion
from parallel.trace.without_data import preserve_module_state
from tests.helpers.lanes import long_where


def living(name: str, norm: str, tile: int, box: int) -> tuple[Boxes, int]:
    """The plan, and the most bytes that live on the device in a step besides parameters and what follows the region."""
    torch.manual_seed(0)
    model = build_model(name, classes=2, norm=norm)  # type: ignore[arg-type]
    for parameter in model.parameters():  # as many as count little
        parameter.requires_grad_(parameter.numel() < 100_000)
    run = streamed(model, box, (1, 3, tile, tile))
    image = torch.rand(1, 3, tile, tile)
    with LiveBytes() as live:
        run(image).square().mean().backward()
    (plan,) = planned_regions(run, tuple(image.shape))
    assert isinstance(plan, PlannedRegion)
    return plan.run.boxes, live.peak_bytes


@pytest.mark.parametrize(
    ("name", "norm", "tile", "box", "within"),
    [
        ("resnet18", "frozen", 256, 64, 0.1),
        ("unet_w4", "frozen", 256, 128, 0.1),
        ("resnet18", "batch", 192, 64, 0.15),  # a box that is the whole map is not copied on a CPU
    ],
)
def test_the_bytes_of_the_fullest_box_are_foreseen(name: str, norm: str, tile: int, box: int, within: float) -> None:
    boxes, measured = living(name, norm, tile, box)
    leaving = sum(boxes.model.sizes[each] for each in boxes.model.leaving if each in boxes.model.sides)
    assert boxes.device_bytes + 2 * leaving == pytest.approx(measured, rel=within)


def test_boxes_keep_to_the_bytes_they_are_planned_for() -> None:
    """A part that would not is cut, unless it is one step in boxes of the asked side."""
    boxes, _ = living("resnet18", "frozen", 256, 64)
    allowed = _whole_tile_bytes(boxes.model) / 16
    for phase, part in boxes.parts():
        assert part.box == 64 or boxes.part_bytes(phase, part) <= 1.05 * allowed


@pytest.mark.parametrize("name", long_where(["resnet18", "torchvision:efficientnet_b0"], "torchvision:efficientnet_b0"))
def test_records_are_those_of_every_step_run(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    work = Workload(name, 64, 2)
    traced = work._traced
    region = work._region(traced)
    runs = []
    run = step_record._Recording._run
    monkeypatch.setattr(step_record._Recording, "_run", lambda *given: (runs.append(1), run(*given))[1])
    with preserve_module_state(traced.model):
        traced.model.train()
        few, fewer = record(traced.model, region), len(runs)
        monkeypatch.setattr(step_record._Recording, "_key", lambda self, step: None)
        each = record(traced.model, region)
    assert few == each
    assert fewer < (len(runs) - fewer) * 0.75
