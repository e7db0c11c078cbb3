"""Exactness: whatever is recomputed, offloaded or on the host, every schedule gives the plain step's numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from parallel.memory.policy import ActivationPolicy
from parallel.strategy import Strategy
from tests.helpers.engine_runs import assert_equal, on_threads, plain, steps_of, strategy_for
from tests.helpers.lanes import long_where
from tests.helpers.small_nets import NETS

POLICIES = {
    "overlap": ActivationPolicy(offload="overlap", smallest=0),
    "overlap, ahead": ActivationPolicy(offload="overlap", smallest=512, ahead=20_000),
    "overlap, little room": ActivationPolicy(offload="overlap", smallest=0, host_bytes=40_000),
    "block": ActivationPolicy(recompute="block"),
    "block and overlap": ActivationPolicy(recompute="block", offload="overlap", smallest=0),
    "block and overlap, ahead": ActivationPolicy(recompute="block", offload="overlap", smallest=0, ahead=20_000),
    "stage and overlap": ActivationPolicy(recompute="stage", offload="overlap", smallest=0),
    "optimizer": ActivationPolicy(optimizer=True),
    "parameters": ActivationPolicy(parameters=True),
    "parameters, block": ActivationPolicy(parameters=True, recompute="block"),
    "parameters, stage": ActivationPolicy(parameters=True, recompute="stage"),
    "all": ActivationPolicy(parameters=True, recompute="block", offload="overlap", smallest=0),
    "parameters, overlap": ActivationPolicy(parameters=True, offload="overlap", smallest=0),
}

WHOLE = {"single": Strategy("single", 1, 1, 4), "ddp": Strategy("ddp", 2, 1, 4)}
SCHEDULES = ("gpipe", "1f1b", "master", "bidirectional", *WHOLE)


def strategy_of(schedule: str, policy: ActivationPolicy) -> Strategy:
    return replace(WHOLE.get(schedule) or strategy_for(schedule, 2, m=4), policy=policy)


@pytest.mark.pairs
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize("schedule", long_where(SCHEDULES, "gpipe", "master", "single"))
@pytest.mark.parametrize("name", NETS)
def test_schedules(name: str, schedule: str, policy: ActivationPolicy) -> None:
    strategy = strategy_of(schedule, policy)
    assert_equal(on_threads(name, strategy, steps_of(strategy.m)), plain(name, strategy.m), torch.float64)


@pytest.mark.parametrize("policy", ["block and overlap", "stage and overlap", "all"])
@pytest.mark.parametrize("schedule", ["1f1b", "bidirectional", "ddp"])
def test_complex_values(schedule: str, policy: str) -> None:
    strategy = strategy_of(schedule, POLICIES[policy])
    assert_equal(on_threads("fourier", strategy, steps_of(strategy.m)), plain("fourier", strategy.m), torch.float64)
