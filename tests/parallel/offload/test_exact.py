"""Exactness: whatever becomes of what forward passes keep, every schedule gives the plain step's numbers."""

from __future__ import annotations

import pytest
import torch

from parallel.memory.policy import ActivationPolicy
from tests.helpers.engine_runs import assert_equal, on_threads, plain, steps_of, strategy_for
from tests.helpers.small_nets import NETS

OFFLOAD = ActivationPolicy(offload="overlap", smallest=0)
AHEAD = ActivationPolicy(offload="overlap", smallest=512, ahead=20_000)
POLICIES = {
    "overlap": OFFLOAD,
    "overlap, ahead": AHEAD,
    "overlap, little room": ActivationPolicy(offload="overlap", smallest=0, host_bytes=40_000),
    "block": ActivationPolicy(recompute="block"),
    "block and overlap": ActivationPolicy(recompute="block", offload="overlap", smallest=0),
    "block and overlap, ahead": ActivationPolicy(recompute="block", offload="overlap", smallest=0, ahead=20_000),
    "stage and overlap": ActivationPolicy(recompute="stage", offload="overlap", smallest=0),
}


@pytest.mark.pairs
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "master", "bidirectional"])
@pytest.mark.parametrize("name", NETS)
def test_schedules(name: str, schedule: str, policy: ActivationPolicy) -> None:
    strategy = strategy_for(schedule, 2, m=4, policy=policy)
    assert_equal(on_threads(name, strategy, steps_of(strategy.m)), plain(name, strategy.m), torch.float64)


@pytest.mark.parametrize("policy", ["overlap", "block", "block and overlap", "stage and overlap"])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "master", "bidirectional"])
def test_complex_values(schedule: str, policy: str) -> None:
    strategy = strategy_for(schedule, 2, m=4, policy=POLICIES[policy])
    assert_equal(on_threads("fourier", strategy, steps_of(strategy.m)), plain("fourier", strategy.m), torch.float64)
