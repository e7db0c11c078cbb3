"""Exactness: whatever is recomputed, offloaded or on the host, every schedule gives the plain step's numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.whole_engine import whole_engine
from parallel.comm.communicator import Communicator
from parallel.comm.thread_comm import run_on_threads
from parallel.memory.policy import ActivationPolicy
from tests.helpers.engine_runs import SGD, assert_equal, net, on_threads, plain, steps_of, strategy_for, train
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


@pytest.mark.pairs
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "master", "bidirectional"])
@pytest.mark.parametrize("name", NETS)
def test_schedules(name: str, schedule: str, policy: ActivationPolicy) -> None:
    strategy = strategy_for(schedule, 2, m=4, policy=policy)
    assert_equal(on_threads(name, strategy, steps_of(strategy.m)), plain(name, strategy.m), torch.float64)


@pytest.mark.parametrize("policy", ["overlap", "block", "block and overlap", "stage and overlap", "optimizer", "all"])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "master", "bidirectional"])
def test_complex_values(schedule: str, policy: str) -> None:
    strategy = strategy_for(schedule, 2, m=4, policy=POLICIES[policy])
    assert_equal(on_threads("fourier", strategy, steps_of(strategy.m)), plain("fourier", strategy.m), torch.float64)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("resident", [False, True], ids=["optimizer", "parameters"])
@pytest.mark.parametrize("name", NETS)
def test_whole_models(name: str, resident: bool, world: int) -> None:
    def rank(communicator: Communicator, away: bool) -> dict[str, Any]:
        policy = ActivationPolicy(offload="overlap", smallest=0, optimizer=True, parameters=resident)
        engine = whole_engine(
            net(name, torch.float64),
            NETS[name][1],
            SGD,
            communicator,
            batch=8,
            m=4,
            shape=tuple(steps_of(4)[0][0][0].shape),
            policy=policy if away else ActivationPolicy(),
        )
        train(engine, steps_of(4))
        return engine.state_dict()

    here, there = (run_on_threads(world, rank, away, timeout_s=60)[0] for away in (False, True))
    assert there["optimizer"].pop("param_groups") == here["optimizer"].pop("param_groups")
    torch.testing.assert_close(there, here, rtol=1e-12, atol=1e-14)
