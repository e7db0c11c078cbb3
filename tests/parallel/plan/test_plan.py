"""A plan is the same after it was saved and read back; what is no plan is refused with a reason."""

from __future__ import annotations

import json

import pytest

from parallel.graph.layers import INPUT, OUTPUT, Layer, LayerGraph
from parallel.memory.policy import ActivationPolicy
from parallel.memory.rank_bytes import RankBytes
from parallel.plan.plan import Plan, PlanRow, limit_of, working_set
from parallel.strategy import Strategy

RUNS = (("conv1", "pool"),)
PLAN = Plan(
    {"model": "resnet18", "tile_px": 512},
    PlanRow(
        Strategy("master", 4, 2, 8, 1, ("layer2", "layer4"), ActivationPolicy("optimal", RUNS, "overlap", 7), 2),
        1.5,
        5.3,
        0.1,
        (10, 20),
    ),
    "calibrated",
    0.07,
    (0.5, 0.25),
)


def test_round_trip() -> None:
    assert Plan.loads(PLAN.dumps()) == PLAN


def test_the_names_that_others_read() -> None:
    written = json.loads(PLAN.dumps())
    assert written["strategy"] == "master"
    assert written["fits"] is True
    assert written["images_per_second"] == 1.5
    assert written["peak_memory_bytes"] == [10, 20]
    assert (written["ranks"], written["depth"], written["m"], written["chunks"]) == (4, 2, 8, 1)
    assert (written["recompute"], written["recomputed"]) == ("optimal", [["conv1", "pool"]])
    assert (written["offload"], written["ahead_bytes"], written["zero"]) == (True, 7, 2)
    assert written["cuts"] == ["layer2", "layer4"]


def test_what_does_not_fit_or_cannot_run() -> None:
    candidate = PLAN.row.strategy
    assert not PlanRow(candidate, over_bytes=1).fits
    assert not PlanRow(candidate, refused="no").fits


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "not a plan"), ("[]", "not a plan"), ('{"version": 1}', "version 1, and this program reads version 3")],
)
def test_what_is_no_plan(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Plan.loads(text)


IMAGE = Layer("x", INPUT, (), differentiable=False, output_bytes=10, output_storages=((0, 10),))
FIRST = Layer("wide", "Conv2d", ("x",), output_bytes=100, saved=((0, 10),), output_storages=((1, 100),))
SECOND = Layer(
    "norm", "BatchNorm2d", ("wide",), output_bytes=100, saved=((1, 100), (2, 4)), output_storages=((3, 100),)
)
ADDED = Layer("added", "add", ("wide", "norm"), output_bytes=100, output_storages=((4, 100),))
GRAPH = LayerGraph((IMAGE, FIRST, SECOND, ADDED, Layer("output", OUTPUT, ("added",), output_bytes=100)))


def test_working_sets() -> None:
    assert working_set(GRAPH, FIRST) == 10 + 100  # the gradient of the image is not needed
    assert working_set(GRAPH, SECOND) == 104 + 2 * 100  # backward: what it keeps and two gradients
    assert working_set(GRAPH, ADDED) == 3 * 100


@pytest.mark.parametrize(
    ("held", "says"),
    [
        (RankBytes(1 << 20, 1 << 20, 2 << 20, 1 << 20, 1 << 20, 0), "parameters, gradients, optimizer state: 4 MiB"),
        (RankBytes(1, 1, 2, 5 << 10, 1 << 10, 1 << 10), "activations kept: 6 KiB"),
        (RankBytes(1, 1, 2, 5, 1 << 20, 1), "working set of norm: 304 B"),
    ],
)
def test_the_largest_part(held: RankBytes, says: str) -> None:
    assert str(limit_of(held, GRAPH, GRAPH.layers)) == says
