"""``--parallel pipedream`` against its reference in one process: weights of the forward pass in the backward pass, an
update after every microbatch."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass

import pytest
import torch

from app.settings.optimization import OptimizerSettings
from app.training import plain_training
from app.training.engines import build_engine, build_optimizer
from app.training.exactness import verify_engine
from app.training.plain_training import ExactnessTrial
from parallel.comm.thread_comm import run_on_threads
from parallel.engine.step import NonFiniteLoss
from parallel.memory.policy import KEEP_ALL, ActivationPolicy
from parallel.schedule.action import versions
from parallel.stage.microbatch_state import WeightVersions
from parallel.strategy import Strategy
from tests.helpers.small_nets import SkipNet

CPU = torch.device("cpu")


@dataclass(frozen=True, eq=False)
class Trial(ExactnessTrial):
    optimizer: OptimizerSettings = dataclasses.field(default_factory=lambda: OptimizerSettings(optimizer="sgd"))

    def make_optimizer(self, parameters):
        return build_optimizer(self.optimizer, parameters)


def trial(sizes=(2,) * 7, **settings):
    torch.manual_seed(3)
    asked = OptimizerSettings(lr=0.05, **{"optimizer": "sgd", **settings})
    return Trial(SkipNet(), sizes, 32, torch.float32, CPU, steps=2, lr=0.05, optimizer=asked)


def engine_of(strategy, each, *arguments):
    return build_engine(strategy, *arguments, batch=sum(each.sizes), tile=each.tile, seed=each.seed, device=CPU)


def errors_of(each, depth, policy=KEEP_ALL, schedule=None):
    strategy = Strategy("pipedream", depth, depth, len(each.sizes), policy=policy, schedule_csv=schedule)
    make = functools.partial(engine_of, strategy, each)

    def run(communicator, _):
        return verify_engine(each, make, communicator, make_reference=plain_training.DelayedTraining)

    return run_on_threads(depth, run, timeout_s=60)[0]


@pytest.mark.parametrize(
    ("depth", "optimizer", "recompute"),
    [
        (3, "adamw", "none"),
        (2, "sgd", "stage"),
        (2, "sgd", "block"),
        pytest.param(4, "adamw", "stage", marks=pytest.mark.long),
    ],
)
def test_a_window_is_that_of_one_process_bit_for_bit(depth, optimizer, recompute):
    assert_same_bits(errors_of(trial(optimizer=optimizer), depth, ActivationPolicy(recompute)))


def assert_same_bits(errors):
    """The mean loss, which only the log shows, is a sum in float64 in another order."""
    assert all(errors.of_tensors.values())
    assert {error for of_kind in errors.of_tensors.values() for error in of_kind.values()} == {0.0}
    assert errors.loss < 1e-15


LATE = "0F0,0F1,0B0,0B1,0U0,0F2,0U1,0B2,0U2\n1F0,1B0,1F1,1U0,1B1,1U1,1F2,1B2,1U2\n"


def test_updates_of_a_schedule_file_may_come_later_than_their_gradients():
    assert_same_bits(errors_of(trial((2, 2, 2), optimizer="adamw"), 2, schedule=LATE))


def test_microbatches_of_unequal_size_and_running_averages():
    assert_same_bits(errors_of(trial((3, 2, 2, 1, 1), ema=0.9), 3))


def test_without_the_old_weights_gradients_are_wrong(monkeypatch):
    """New storage in the old ``Parameter`` objects: where versions are not counted, autograd says nothing, and
    convolutions use the new weights."""
    update = WeightVersions.update

    def swap(self):
        for parameter in self._newest:
            parameter.data = parameter.detach().clone()
        return {}

    def uncounted(self, i, step):
        def quietly(new):
            with torch.autograd._unsafe_preserve_version_counter(self._newest):
                step(new)

        update(self, i, quietly)

    monkeypatch.setattr(WeightVersions, "_renew", swap)
    monkeypatch.setattr(WeightVersions, "update", uncounted)
    errors = errors_of(trial(), 3)
    assert errors.of_kind("gradients") > 1e-3
    assert errors.of_kind("parameters") > 1e-4


def steps(name, each):
    """Return losses, gradients and state after three steps on two ranks."""

    def run(communicator, _):
        strategy = Strategy(name, 2, 2, len(each.sizes))
        engine = engine_of(strategy, each, each.fresh_module(), each.loss, each.make_optimizer, communicator)
        losses = []
        for step in range(3):
            batch = (each.microbatch(step, i, engine.wants(i)) for i in engine.share)
            losses.append(engine.step(batch, step, each.lr).loss)
        state = engine.state_dict()
        return losses, engine.gradients(), [state["model"], state["optimizer"]["state"]] if state else []

    return run_on_threads(2, run, timeout_s=60)


def test_a_window_of_one_microbatch_is_1f1b_bit_for_bit():
    ours, plain = (steps(name, trial((3,), optimizer="adamw")) for name in ("pipedream", "1f1b"))
    torch.testing.assert_close(ours, plain, rtol=0, atol=0)


def test_the_versions_are_those_of_the_paper():
    """max(0, i - (D - 1 - s)) updates before the forward pass of microbatch i; D - s versions at a time."""
    for depth in (2, 3, 4, 6):
        schedule = Strategy("pipedream", depth, depth, 2 * depth).schedule({(s, s + 1): True for s in range(depth - 1)})
        for stage, actions in schedule.items():
            used, most = versions(actions)
            assert used == {(stage, i): max(0, i - (depth - 1 - stage)) for i in range(2 * depth)}
            assert most == depth - stage
    assert versions(Strategy("1f1b", 3, 3, 9).schedule({(0, 1): True, (1, 2): True})[0])[1] == 1


def test_a_rank_holds_as_many_weights_as_planned(monkeypatch):
    most = {}
    begin = WeightVersions.begin

    def counted(self, i):
        begin(self, i)
        held = {id(version): version for version in (self._newest, *self._used.values())}.values()
        storages = {p.untyped_storage().data_ptr() for version in held for p in version}
        most[id(self)] = max(most.get(id(self), 0), len(storages) // len(self._newest))

    monkeypatch.setattr(WeightVersions, "begin", counted)
    errors_of(trial(), 4)
    assert sorted(most.values()) == [1, 2, 3, 4]


def test_a_loss_that_is_not_finite_says_that_weights_were_updated():
    each = trial((2, 2, 2))

    def run(communicator, _):
        strategy = Strategy("pipedream", 2, 2, 3)
        engine = engine_of(strategy, each, each.fresh_module(), each.loss, each.make_optimizer, communicator)
        before = {name: p.detach().clone() for s in engine._work.stages.values() for name, p in s.parameters.items()}
        batch = [each.microbatch(0, i, engine.wants(i)) for i in engine.share]
        if batch[1].images is not None:
            batch[1] = batch[1]._replace(images=batch[1].images * torch.nan)
        with pytest.raises(NonFiniteLoss) as raised:
            engine.step(batch, 0, each.lr)
        after = {name: p for s in engine._work.stages.values() for name, p in s.parameters.items()}
        assert any(not torch.equal(before[name], after[name]) for name in before)
        return raised.value.updated, raised.value.microbatches

    assert run_on_threads(2, run, timeout_s=60) == [(True, [1, 2])] * 2
