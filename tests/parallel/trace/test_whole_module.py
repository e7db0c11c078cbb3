"""Whole models that are computed again in parts or keep their activations on the host: exact, and really doing it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parallel.comm.communicator import Communicator
from parallel.comm.local import LocalCommunicator
from parallel.comm.thread_comm import run_on_threads
from parallel.engine.data_parallel import DataParallelEngine
from parallel.engine.step import Microbatch
from parallel.memory.policy import ActivationPolicy
from parallel.offload.activation_meter import ActivationMeter
from parallel.offload.live_bytes import LiveBytes
from parallel.offload.saved_tensors import SavedTensors
from parallel.trace.stage_module import StageModule
from parallel.trace.whole_module import in_segments
from tests.helpers.engine_runs import CPU, SEED, SGD, net, plain, steps_of, train
from tests.helpers.small_nets import ALL_NETS, NETS

POLICIES = {
    "overlap": ActivationPolicy(offload="overlap", smallest=0, ahead=10_000),
    "block": ActivationPolicy(recompute="block"),
    "both": ActivationPolicy(recompute="block", offload="overlap", smallest=0),
}


def engine(
    name: str, policy: ActivationPolicy, communicator: Communicator, meter: ActivationMeter
) -> DataParallelEngine:
    model = in_segments(net(name, torch.float64), policy, tuple(steps_of(4)[0][0][0].shape), communicator)
    meter.exclude((*model.parameters(), *model.buffers()))
    saved_tensors = SavedTensors(policy, CPU, meter=meter)
    loss = ALL_NETS[name][1]
    return DataParallelEngine(
        model, loss, SGD(model.named_parameters()), communicator, batch=8, m=4, seed=SEED, saved_tensors=saved_tensors
    )


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("name", ALL_NETS)
def test_exact(name: str, world: int, policy: ActivationPolicy) -> None:
    def rank(communicator: Communicator, _: Any) -> tuple[dict[str, Tensor], list[float]]:
        made = engine(name, policy, communicator, ActivationMeter())
        losses = train(made, steps_of(4))
        return made.state_dict().get("model", {}), losses

    state, losses = run_on_threads(world, rank, None, timeout_s=60)[0]
    expected = plain(name, 4)
    assert losses == pytest.approx(expected.losses, rel=1e-10)
    assert list(state) == list(expected.model)
    torch.testing.assert_close(state, expected.model, rtol=1e-9, atol=1e-11)


@pytest.mark.long
def test_less_is_kept_on_the_device() -> None:
    kept = {}
    for label, policy in {"none": ActivationPolicy(), **POLICIES}.items():
        meter = ActivationMeter()
        train(engine("skips", policy, LocalCommunicator(), meter), steps_of(4))
        kept[label] = meter.peak_bytes
    assert kept["block"] < 0.8 * kept["none"]
    assert kept["overlap"] < 0.4 * kept["none"]
    assert kept["both"] < 0.6 * kept["block"]


def test_a_model_that_keeps_everything_stays_as_it_is() -> None:
    model = net("skips", torch.float64)
    assert in_segments(model, ActivationPolicy(), (2, 3, 12, 12), LocalCommunicator()) is model
    assert isinstance(
        in_segments(model, ActivationPolicy(offload="overlap"), (2, 3, 12, 12), LocalCommunicator()), StageModule
    )
    assert isinstance(in_segments(model, ActivationPolicy("block"), (2, 3, 12, 12), LocalCommunicator()), StageModule)


class _Restless(nn.Module):
    """Takes another way each time, and cannot be traced."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.steady = False

    def forward(self, x: Tensor) -> Tensor:
        self.calls += not self.steady
        return x.sin() if not x.isnan().any() and (self.calls % 2 or self.steady) else x * x.sigmoid()


def test_a_value_that_left_for_the_host_is_not_held_by_whoever_gave_it() -> None:
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
    for cut in (False, True):
        torch.manual_seed(0)
        model: nn.Module = Deep()
        if cut:
            model = in_segments(model, policy, shape, LocalCommunicator())
        made = DataParallelEngine(
            model,
            lambda output, target: output,
            SGD(model.named_parameters()),
            LocalCommunicator(),
            batch=1,
            m=1,
            saved_tensors=SavedTensors(policy, CPU),
        )
        with LiveBytes() as live:
            made.step([Microbatch(torch.ones(shape), torch.zeros(1), shape)], 0, 0.0)
        peaks.append(live.peak_bytes)
    assert peaks[1] < peaks[0]


def test_a_model_that_cannot_be_traced_is_offloaded_as_it_is() -> None:
    class Untraceable(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if x.sum() > 0 else x

    model = Untraceable(12, 12)
    assert in_segments(model, ActivationPolicy(offload="overlap"), (2, 3, 12, 12), LocalCommunicator()) is model
    with pytest.raises(ValueError, match="cannot be cut into layers: its path depends on the values of tensors"):
        in_segments(model, ActivationPolicy("block"), (2, 3, 12, 12), LocalCommunicator())


def test_a_part_that_does_not_compute_the_same_twice_is_refused() -> None:
    """Before the first step, where that shows then."""
    restless, policy = _Restless(), ActivationPolicy("optimal", (("input_1", "_1"),))
    model = nn.Sequential(nn.Conv2d(3, 4, 1), restless, nn.Conv2d(4, 4, 1), nn.Conv2d(4, 3, 1))
    with pytest.raises(ValueError, match="calls of _Restless is an attribute that each forward"):
        in_segments(model, policy, (2, 3, 12, 12), LocalCommunicator())
    restless.steady = True
    model = in_segments(model, policy, (2, 3, 12, 12), LocalCommunicator())
    restless.steady = False
    made = DataParallelEngine(
        model,
        NETS["skips"][1],
        SGD(model.named_parameters()),
        LocalCommunicator(),
        batch=8,
        m=4,
        saved_tensors=SavedTensors(policy, CPU),
    )
    with pytest.raises(RuntimeError, match="does not compute the same twice"):
        train(made, [[(i.float(), t) for i, t in batch] for batch in steps_of(4)])
