"""A plan is the same after it was saved and read back; what is no plan is refused with a reason."""

from __future__ import annotations

import json

import pytest

from parallel.memory.policy import ActivationPolicy
from parallel.plan.plan import Plan, PlanRow
from parallel.strategy import Strategy

RUNS = (("conv1", "pool"),)
PLAN = Plan(
    {"model": "resnet18", "tile_px": 512},
    PlanRow(
        Strategy("master", 4, 2, 8, 1, ("layer2", "layer4"), ActivationPolicy("optimal", RUNS, "overlap", 7), True),
        1.5,
        5.3,
        0.1,
        (10, 20),
    ),
    "calibrated",
    0.07,
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
    assert (written["offload"], written["ahead_bytes"], written["shard_optimizer"]) == (True, 7, True)
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
