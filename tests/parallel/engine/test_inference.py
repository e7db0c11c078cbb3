"""Prediction over stages is the plain model's evaluation, wherever the stages are, and leaves training as it was."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parallel.build import assemble
from parallel.comm.communicator import Communicator
from parallel.comm.thread_comm import run_on_threads
from parallel.engine.engine import Engine
from parallel.engine.step import Microbatch, NeededInputs
from parallel.schedule.registry import SCHEDULES
from parallel.strategy import Strategy
from tests.helpers.small_nets import NETS, drawn_once

SIZES = [(2, 3, 12, 12), (1, 3, 20, 16), (3, 3, 8, 8)]
"""Successive microbatches: tiles and shapes change."""


class AuxiliaryInTraining(nn.Module):
    """A head that only training has, as GoogLeNet's: in evaluation nothing goes to the stages that would use it."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
        self.early = nn.Conv2d(4, 3, 1)
        self.body = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
        self.late = nn.Conv2d(4, 3, 1)

    def forward(self, images: Tensor) -> Any:
        stem = self.stem(images)
        early = self.early(stem) if self.training else None
        late = self.late(self.body(stem))
        return (late, early) if self.training else late


def model(name: str) -> nn.Module:
    """With running statistics that are not those it was made with."""
    return drawn_once(("prediction", name), 3, lambda: _trained(name))


def _trained(name: str) -> nn.Module:
    net = AuxiliaryInTraining() if name == "auxiliary" else NETS[name][0]()
    net.train()
    net(torch.randn(4, 3, 12, 12))
    return net


def images(k: int) -> Tensor:
    return torch.randn(SIZES[k], generator=torch.Generator().manual_seed(k))


def mean(output: Any, _: Tensor) -> Tensor:
    leaves = output.values() if isinstance(output, dict) else output if isinstance(output, tuple) else [output]
    return sum((leaf.square().mean() for leaf in leaves), torch.zeros(()))


def build(communicator: Communicator, name: str, strategy: Strategy) -> Engine:
    sgd = functools.partial(torch.optim.SGD, lr=0.1)
    net = model(name)
    cpu = torch.device("cpu")
    return assemble(net, mean, sgd, communicator, strategy, shape=SIZES[0], batch=2 * strategy.m, device=cpu)


def predicted(name: str, strategy: Strategy) -> list[list[tuple[NeededInputs, Any]]]:
    """Of each rank, for each microbatch."""

    def rank(communicator: Communicator, _: None) -> list[tuple[NeededInputs, Any]]:
        engine = build(communicator, name, strategy)
        wants = engine.predict_wants
        return [
            (wants, engine.predict(Microbatch(images(k) if wants.images else None, None, SIZES[k])))
            for k in range(len(SIZES))
        ]

    return run_on_threads(strategy.ranks, rank)


def assert_plain(name: str, ranks: list[list[tuple[NeededInputs, Any]]], groups: int) -> None:
    plain = model(name).eval()
    for k in range(len(SIZES)):
        with torch.no_grad():
            expected = plain(images(k))
        outputs = [rank[k][1] for rank in ranks if rank[k][0].targets]
        assert len(outputs) == groups
        assert all(rank[k][1] is None for rank in ranks if not rank[k][0].targets)
        for output in outputs:
            torch.testing.assert_close(output, expected)


def strategy(schedule: str, depth: int, groups: int = 1) -> Strategy:
    chunks = 2 if SCHEDULES[schedule].chunks else 1
    return Strategy(schedule, groups * depth, depth, 2 * groups, chunks=chunks)


@pytest.mark.parametrize("name", ["skips", "two-outputs"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_placement_gives_the_plain_evaluation(schedule: str, name: str) -> None:
    assert_plain(name, predicted(name, strategy(schedule, 3)), 1)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "bidirectional"])
def test_each_group_predicts_for_itself(schedule: str) -> None:
    assert_plain("skips", predicted("skips", strategy(schedule, 2, groups=2)), 2)


@pytest.mark.parametrize("schedule", ["gpipe", "interleaved", "mast"])
def test_what_only_training_makes_is_not_sent(schedule: str) -> None:
    assert_plain("auxiliary", predicted("auxiliary", strategy(schedule, 2)), 1)


def test_only_the_ends_of_replica_0_want_anything() -> None:
    ranks = predicted("skips", strategy("bidirectional", 4))
    assert [rank[0][0] for rank in ranks] == [(True, False), (False, False), (False, False), (False, True)]


def test_predicting_leaves_weights_statistics_and_the_next_step_alone() -> None:
    def state(communicator: Communicator, between: bool) -> dict[str, Any]:
        engine = build(communicator, "skips", strategy("1f1b", 2))
        for step in range(2):
            wants = [engine.wants(i) for i in engine.share]
            mine = [
                Microbatch(images(0) if want.images else None, torch.zeros(2) if want.targets else None, SIZES[0])
                for want in wants
            ]
            engine.step(mine, step, 0.1)
            if between:
                engine.predict(Microbatch(images(1) if engine.predict_wants.images else None, None, SIZES[1]))
        return engine.state_dict()

    with_it, without = (run_on_threads(2, state, between)[0]["model"] for between in (True, False))
    assert with_it.keys() == without.keys()
    assert all(torch.equal(with_it[key], without[key]) for key in without)
