"""Faults put into an engine are found by ``app.verify``, in both types; rounding in float32 is not called a fault."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from app.settings.strategy import StrategySettings
from app.verify import VerifyCommand, VerifyResult, main, verify
from parallel.engine.engine import Engine
from parallel.engine.optimizer_step import OptimizerStep
from parallel.stage.batchnorm import RunningStatistics, untouched
from parallel.stage.stage import Stage
from parallel.team.team_comm import TeamComm
from tests.helpers.lanes import long_where

MODEL = "tests.helpers.tiny_models:classifier"
Patch = pytest.MonkeyPatch
Fault = Callable[[Patch], None]


def verified(parallel: Any, ranks: int, **more: Any) -> VerifyResult:
    strategy = {key: more.pop(key) for key in ("grid", "channels_last") if key in more}
    asked = StrategySettings(parallel=parallel, ranks=ranks, batch=4, **strategy)
    result = verify(VerifyCommand(asked, **{"model": MODEL, "tile": 64, "steps": 2, **more}))
    assert result is not None
    return result


def detached_halo(patch: Patch) -> None:
    """Gradients of rows and columns that came from another rank are lost."""
    right = TeamComm.send_halo_grads

    def detached(link: TeamComm, exchange: Any, gradients: Any, *more: Any) -> Any:
        return right(link, exchange, [gradient * 0 for gradient in gradients], *more)

    patch.setattr(TeamComm, "send_halo_grads", detached)


def lost_microbatch(patch: Patch) -> None:
    right = Stage.backward

    def backward(stage: Stage, i: int, gradients: Any, weight: float) -> Any:
        return right(stage, i, gradients, weight=weight * (i != 1))

    patch.setattr(Stage, "backward", backward)


def before_update(change: Callable[[OptimizerStep], object]) -> Fault:
    """A fault that does ``change`` before parameters are updated."""

    def fault(patch: Patch) -> None:
        right = OptimizerStep.apply

        def apply(update: OptimizerStep, learning_rate: float, scale: float) -> None:
            change(update)
            right(update, learning_rate, scale)

        patch.setattr(OptimizerStep, "apply", apply)

    return fault


def double_bias(update: OptimizerStep) -> None:
    if (bias := update.owned.get("9.bias")) is not None:
        assert bias.grad is not None
        bias.grad *= 2


def set_momentum(update: OptimizerStep) -> None:
    assert update.optimizer is not None
    for group in update.optimizer.param_groups:
        group["momentum"] = 0.89


def forget_momentum(update: OptimizerStep) -> None:
    assert update.optimizer is not None
    update.optimizer.state.clear()


def skipped_statistic(patch: Patch) -> None:
    """Batch norm does not count the second microbatch."""
    right = RunningStatistics.microbatch

    @contextlib.contextmanager
    def microbatch(statistics: RunningStatistics, i: int) -> Iterator[None]:
        with untouched(statistics._active if i == 1 else []), right(statistics, i):
            yield
        if i == 1 and i in statistics._records:  # for other ranks, or for later
            statistics._records[i].zero_()

    patch.setattr(RunningStatistics, "microbatch", microbatch)


FAULTS: dict[str, tuple[Fault, str]] = {
    "a lost microbatch": (lost_microbatch, "gradients"),
    "a doubled bias": (before_update(double_bias), "gradients"),
    "a skipped statistic": (skipped_statistic, "statistics"),
    "a wrong momentum": (before_update(set_momentum), "parameters"),
    "a momentum that is lost between steps": (before_update(forget_momentum), "parameters"),
}


@pytest.mark.parametrize("parallel", long_where(["gpipe", "1f1b", "master"], "gpipe", "1f1b"))
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found(fault: str, parallel: str, monkeypatch: Patch) -> None:
    assert verified(parallel, 2).passed
    put, kind = FAULTS[fault]
    put(monkeypatch)
    result = verified(parallel, 2)
    assert not result.passed
    assert result.exceeded
    assert any(f"({kind})" in tensor for tensor in result.exceeded)
    assert fault != "a doubled bias" or result.exceeded[0].startswith("9.bias")


@pytest.mark.parametrize("grid", ["2x1", "3x1"])
def test_a_detached_halo_is_found(grid: str, monkeypatch: Patch) -> None:
    ranks = int(grid[0])
    assert verified("spatial", ranks, grid=grid).passed
    detached_halo(monkeypatch)
    result = verified("spatial", ranks, grid=grid)
    assert not result.passed
    assert "0.weight (gradients)" in result.exceeded


def test_a_copy_of_the_model_that_drifts_is_found(monkeypatch: Patch) -> None:
    """The second rank's copy is in no checkpoint: only its next step shows it."""
    right = Engine.step

    def step(engine: Engine, *given: Any) -> Any:
        result = right(engine, *given)
        if engine._communicator.rank:
            with torch.no_grad():
                next(engine._work.stages[0].module.parameters()).mul_(1 + 1e-6)
        return result

    monkeypatch.setattr(Engine, "step", step)
    assert verified("ddp", 2, steps=1).passed
    assert not verified("ddp", 2).passed


@pytest.mark.parametrize(("put", "parallel"), [(lost_microbatch, "1f1b"), (detached_halo, "spatial")])
def test_a_fault_in_float32_is_not_called_rounding(put: Fault, parallel: str, monkeypatch: Patch) -> None:
    put(monkeypatch)
    result = verified(parallel, 2, dtype="float32", **({"grid": "2x1"} if parallel == "spatial" else {}))
    assert not result.passed
    assert result.float64_error is not None
    assert result.float64_error > 1e-3


def test_rounding_in_float32_is_called_so(capsys: pytest.CaptureFixture[str], monkeypatch: Patch) -> None:
    right = Stage.backward

    def backward(stage: Stage, i: int, gradients: Any, weight: float) -> Any:
        """As if one rounding had decided otherwise: a share of each gradient that float64 does not have."""
        single = next(stage.module.parameters()).dtype == torch.float32
        return right(stage, i, gradients, weight=weight * (1 + 1e-4 * single))

    monkeypatch.setattr(Stage, "backward", backward)
    given = ("--model", MODEL, "--tile", "64", "--batch", "4", "--parallel", "1f1b", "--ranks", "2")
    assert main([*given, "--dtype", "float32"]) == 0
    said = capsys.readouterr().out
    assert "passed" in said
    assert "rounding" in said


def test_a_loss_that_is_not_finite_is_never_rounding(monkeypatch: Patch) -> None:
    right = OptimizerStep.apply

    def apply(update: OptimizerStep, learning_rate: float, scale: float) -> None:
        right(update, learning_rate, scale)
        for parameter in update.owned.values():
            if parameter.dtype == torch.float32:
                parameter.data.fill_(torch.inf)

    monkeypatch.setattr(OptimizerStep, "apply", apply)
    assert not verified("1f1b", 2, dtype="float32", steps=1).passed
