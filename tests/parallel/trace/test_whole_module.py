"""Whole models that are recomputed in parts or keep their activations on the host: they hold less, or are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.whole_engine import whole_engine
from parallel.comm.local import LocalCommunicator
from parallel.engine.step import Microbatch
from parallel.memory.policy import ActivationPolicy
from parallel.offload.live_bytes import LiveBytes
from parallel.trace import untraced
from parallel.trace.stage_module import StageModule
from parallel.trace.untraced import UntracedModule
from tests.helpers.engine_runs import SGD, net, steps_of, train
from tests.helpers.small_nets import pixel_loss

SHAPE = (2, 3, 12, 12)
POLICIES = {
    "overlap": ActivationPolicy(offload="overlap", smallest=0, ahead=10_000),
    "block": ActivationPolicy(recompute="block"),
    "both": ActivationPolicy(recompute="block", offload="overlap", smallest=0),
}


def stage_of(model: nn.Module, policy: ActivationPolicy) -> StageModule:
    engine = whole_engine(model, pixel_loss, SGD, LocalCommunicator(), batch=8, m=4, shape=SHAPE, policy=policy)
    return engine._work.stages[0].module


def test_a_model_that_keeps_everything_is_called_as_it_is() -> None:
    model = net("skips", torch.float64)
    assert stage_of(model, ActivationPolicy()).root is model
    for policy in (ActivationPolicy(offload="overlap"), ActivationPolicy("block")):
        assert not isinstance(stage_of(model, policy), UntracedModule)


def test_a_model_that_is_called_keeps_its_names_modes_and_state() -> None:
    model = net("skips", torch.float64)
    stage = UntracedModule(model)
    for names in ("named_parameters", "named_buffers", "named_modules"):
        assert list(getattr(stage, names)()) == list(getattr(model, names)())
    assert list(stage.state_dict()) == list(model.state_dict())
    stage.eval()
    assert not any(module.training for module in model.modules())


class _Restless(nn.Module):
    """Takes another way each time, and cannot be traced."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.steady = False

    def forward(self, x: Tensor) -> Tensor:
        self.calls += not self.steady
        return x.sin() if not x.isnan().any() and (self.calls % 2 or self.steady) else x * x.sigmoid()


def untraceable(*_: Any) -> Any:
    raise ValueError


def test_a_value_that_left_for_the_host_is_not_held_by_whoever_gave_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a user's forward pass would hold what it gave to a module, for as long as that computes."""

    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(*(nn.Conv2d(3, 3, 3, padding=1) for _ in range(4)))

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.body(torch.cat((x, x, x), 2) * 2)
            return out.mean()

    shape, peaks = (1, 3, 64, 64), []
    policy = ActivationPolicy(offload="overlap", smallest=0)
    for traced in (False, True):
        torch.manual_seed(0)
        with monkeypatch.context() as patch:
            if not traced:
                patch.setattr(untraced, "trace_exclusively", untraceable)
            loss = lambda output, target: output  # noqa: E731
            made = whole_engine(Deep(), loss, SGD, LocalCommunicator(), batch=1, m=1, shape=shape, policy=policy)
        with LiveBytes() as live:
            made.step([Microbatch(torch.ones(shape), torch.zeros(1), shape)], 0, 0.0)
        peaks.append(live.peak_bytes)
    assert peaks[1] < peaks[0]


def test_a_model_that_cannot_be_traced_is_offloaded_as_it_is() -> None:
    class Untraceable(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if x.sum() > 0 else x

    model = Untraceable(12, 12)
    assert stage_of(model, ActivationPolicy(offload="overlap")).root is model
    with pytest.raises(ValueError, match="cannot be cut into layers: its path depends on the values of tensors"):
        stage_of(model, ActivationPolicy("block"))


def test_a_part_that_does_not_compute_the_same_twice_is_refused() -> None:
    """Before the first step, where that shows then."""
    restless, policy = _Restless(), ActivationPolicy("optimal", (("input_1", "_1"),))
    model = nn.Sequential(nn.Conv2d(3, 4, 1), restless, nn.Conv2d(4, 4, 1), nn.Conv2d(4, 3, 1))
    with pytest.raises(ValueError, match="calls of _Restless is an attribute that each forward"):
        stage_of(model, policy)
    restless.steady = True
    made = whole_engine(model, pixel_loss, SGD, LocalCommunicator(), batch=8, m=4, shape=SHAPE, policy=policy)
    restless.steady = False
    with pytest.raises(RuntimeError, match="does not compute the same twice"):
        train(made, [[(i.float(), t) for i, t in batch] for batch in steps_of(4)])
