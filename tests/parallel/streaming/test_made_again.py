"""Maps that a later phase makes again instead of storing them: the same gradients, and fewer bytes on the host."""

from __future__ import annotations

import copy

import torch

from benchmarks.in_boxes import planned_regions, streamed
from parallel.team.boxed_nodes import PlannedRegion
from tests.parallel.streaming.test_models import model_of, step


def test_maps_made_again_give_the_gradients_of_the_plain_step() -> None:
    model = model_of("resnet18", "batch").double()
    images = torch.rand(2, 3, 35, 35, dtype=torch.float64)
    expected, gradients = step(copy.deepcopy(model), images)
    usual = None
    for share in (1.0, 0.6):
        own = copy.deepcopy(model)
        run = streamed(own, 20, tuple(images.shape), usual and int(usual * share))
        (plan,) = planned_regions(run, tuple(images.shape))
        assert isinstance(plan, PlannedRegion)
        boxes = plan.run.boxes
        usual = usual or boxes.host_bytes
        assert boxes.host_bytes <= share * usual
        output, given = step(run, images)
        assert (output - expected).abs().max() < 1e-10
        assert given.keys() == gradients.keys()
        assert max(float((given[key] - gradients[key]).abs().max()) for key in gradients) < 1e-10
