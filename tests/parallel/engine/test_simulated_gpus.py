"""Strategies on simulated GPUs, a rank each, over the project's own communicator: the numbers of the plain step, and no
race, whether kernels and messages run at once, as late as their order allows, or in between."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from parallel.memory.policy import ActivationPolicy
from parallel.offload.copies import CudaCopies
from parallel.space.team import Grid
from parallel.strategy import Strategy
from tests.helpers.engine_runs import assert_equal, on_gpus, on_threads, plain, steps_of, strategy_for
from tests.helpers.lanes import long_where

M = 3
STRIPS = Grid(2, 1)
SOME_MAPS = 40_000
"""Bytes of maps of one microbatch of two."""
OFFLOAD = ActivationPolicy(offload="overlap", smallest=0)
STRATEGIES = {
    **{name: strategy_for(name, 2, m=M) for name in ("gpipe", "interleaved", "zero-bubble", "mast", "master")},
    "1f1b": strategy_for("1f1b", 3, m=M),
    "bidirectional": strategy_for("bidirectional", 2, m=4),
    "hybrid": strategy_for("1f1b", 2, groups=2, m=2),
    "hybrid of eight": strategy_for("bidirectional", 4, groups=2, m=2),
    "ddp": Strategy("ddp", 2, 1, M),
    "spatial": Strategy("spatial", 2, 1, 2, grid=STRIPS),
    "teams in 1f1b": Strategy("1f1b", 4, 2, 2, grid=STRIPS),
    "teams in 1f1b of four stages": Strategy("1f1b", 8, 4, 4, grid=STRIPS),
    "teams in master": Strategy("master", 4, 2, M, grid=STRIPS),
    "zero 1, replicas": strategy_for("master", 2, m=2, zero=1),
    "offload": strategy_for("1f1b", 2, m=M, policy=OFFLOAD),
    "offload, ahead": strategy_for("gpipe", 2, m=M, policy=ActivationPolicy("none", (), "overlap", 20_000, 512)),
    "recompute blocks": strategy_for("gpipe", 2, m=M, policy=ActivationPolicy("block")),
    "recompute stages, offload": strategy_for("1f1b", 2, m=M, policy=ActivationPolicy("stage", (), "overlap", 0, 0)),
    "optimizer on the host": strategy_for("1f1b", 2, m=M, policy=ActivationPolicy(optimizer=True)),
    "parameters on the host": strategy_for("1f1b", 2, m=M, policy=ActivationPolicy(optimizer=True, parameters=True)),
    "ddp, parameters on the host": Strategy("ddp", 2, 1, M, policy=ActivationPolicy(optimizer=True, parameters=True)),
    "ddp, offload": Strategy("ddp", 2, 1, M, policy=OFFLOAD),
    "ddp, streamed": Strategy("ddp", 2, 1, 2, policy=ActivationPolicy(stream=8)),
    "spatial, streamed": Strategy("spatial", 2, 1, 2, grid=STRIPS, policy=ActivationPolicy(stream=8)),
    "1f1b, streamed": Strategy("1f1b", 2, 2, 2, policy=ActivationPolicy(stream=8)),
    "spatial, streamed, maps on the device": Strategy(
        "spatial", 2, 1, 2, grid=STRIPS, policy=ActivationPolicy(stream=8, map_bytes=1 << 20)
    ),
}


QUICK = {
    "late": {
        *("1f1b", "zero-bubble", "master", "bidirectional", "hybrid", "ddp", "teams in 1f1b"),
        *("zero 1, replicas", "recompute stages, offload", "parameters on the host"),
    },
    "at once": {"1f1b"},
    "in between": {"ddp"},
}
"""Most is found where all is as late as may be, and where each mechanism is once: the quick lane has little else."""
CASES = [
    pytest.param(name, late, id=f"{name}, {said}", marks=() if name in QUICK[said] else pytest.mark.long)
    for name in STRATEGIES
    for said, late in {"late": 0, "at once": None, "in between": 1}.items()
]


def test_updates_after_every_microbatch_race_with_nothing() -> None:
    """As late as may be, the numbers are those of the CPU."""
    strategy = strategy_for("pipedream", 2, m=3)
    steps = steps_of(strategy.m)
    found, expected = on_gpus("skips", strategy, steps, 0), on_threads("skips", strategy, steps)
    torch.testing.assert_close(
        [(rank["losses"], rank["gradients"], rank["state"].get("model")) for rank in found],
        [(rank["losses"], rank["gradients"], rank["state"].get("model")) for rank in expected],
    )


@pytest.mark.parametrize(("name", "late"), CASES)
def test_strategies(name: str, late: int | None) -> None:
    """The net draws in two stages."""
    strategy = STRATEGIES[name]
    ranks = on_gpus("skips", strategy, steps_of(strategy.m), late)
    assert_equal(ranks, plain("skips", strategy.m), torch.float64, tolerance=1e-12)


@pytest.mark.long
def test_maps_of_boxes_stay_on_the_device_while_they_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipeline, of which one rank has several microbatches under way."""
    moved, copied = [0], CudaCopies._copied

    def counted(copies: CudaCopies, direction: Any, source: Tensor, target: Tensor) -> Any:
        moved[-1] += source.nbytes
        return copied(copies, direction, source, target)

    monkeypatch.setattr(CudaCopies, "_copied", counted)
    for most in (0, SOME_MAPS, 1 << 20):
        strategy = Strategy("1f1b", 2, 2, 2, policy=ActivationPolicy(stream=8, map_bytes=most))
        assert_equal(on_gpus("skips", strategy, steps_of(2), 0), plain("skips", 2), torch.float64, tolerance=1e-12)
        moved.append(0)
    all_moved, some, none, _ = moved
    assert all_moved > some > none == 0


SHARP = ("1f1b", "interleaved", "master", "mast", "bidirectional", "hybrid")
"""Whose receives and sums most easily come before what they depend on."""


@pytest.mark.parametrize("name", long_where(STRATEGIES, *set(STRATEGIES) - set(SHARP)))
def test_any_rank_may_wait_for_its_device_at_any_time(name: str) -> None:
    """As where memory has to be freed: no receive and no sum that holds a device depends on what comes after it."""
    strategy = STRATEGIES[name]
    ranks = on_gpus("skips", strategy, steps_of(strategy.m), sync_every=3)
    assert_equal(ranks, plain("skips", strategy.m), torch.float64, tolerance=1e-12)


@pytest.mark.parametrize("late", [None, 0])
def test_complex_values(late: int | None) -> None:
    strategy = strategy_for("1f1b", 2, m=M)
    assert_equal(on_gpus("fourier", strategy, steps_of(M), late), plain("fourier", M), torch.float64, tolerance=1e-12)
