"""A plan is the same after it was saved and read back; what is no plan is refused with a reason."""

from __future__ import annotations

import json

import pytest

from parallel.plan.candidate import Candidate
from parallel.plan.plan import Plan, PlanRow

PLAN = Plan(
    {"model": "resnet18", "tile_px": 512},
    PlanRow(
        Candidate("master", 4, 2, 8, recompute="optimal", offload=True),
        ("layer2", "layer4"),
        1.5,
        5.3,
        0.1,
        (10, 20),
        chosen=(("conv1", "pool"),),
        ahead_bytes=7,
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


def test_what_does_not_fit_or_cannot_run() -> None:
    candidate = PLAN.row.candidate
    assert not PlanRow(candidate, over_bytes=1).fits
    assert not PlanRow(candidate, refused="no").fits


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "not a plan"), ("[]", "not a plan"), ('{"version": 1}', "version 1, and this program reads version 2")],
)
def test_what_is_no_plan(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Plan.loads(text)
