"""Prediction over stages is the plain model's evaluation, wherever the stages are, and leaves training as it was."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from parallel.build import assemble
from parallel.comm.communicator import Communicator
from parallel.comm.thread_comm import run_on_threads
from parallel.engine.engine import Engine
from parallel.engine.step import Microbatch, NeededInputs
from parallel.strategy import Strategy
from tests.helpers.engine_runs import strategy_for, train
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


def images(k: int) -> Tensor:
    return torch.randn(SIZES[k], generator=torch.Generator().manual_seed(k))


def model(name: str) -> nn.Module:
    def trained() -> nn.Module:
        net = AuxiliaryInTraining() if name == "auxiliary" else NETS[name][0]()
        net.train()(torch.randn(4, 3, 12, 12))
        return net

    return drawn_once(("prediction", name), 3, trained)


def engine_of(communicator: Communicator, name: str, strategy: Strategy) -> Engine:
    return assemble(
        model(name),
        lambda output, _: sum(leaf.square().mean() for leaf in tree_leaves(output)),
        functools.partial(torch.optim.SGD, lr=0.1),
        communicator,
        strategy,
        shape=SIZES[0],
        batch=2 * strategy.m,
        device=torch.device("cpu"),
    )


def predicted(name: str, strategy: Strategy) -> list[list[tuple[NeededInputs, Any]]]:
    def rank(communicator: Communicator, _: None) -> list[tuple[NeededInputs, Any]]:
        engine = engine_of(communicator, name, strategy)
        asks = engine.predict_wants
        return [
            (asks, engine.predict(Microbatch(images(k) if asks.images else None, None, SIZES[k]))) for k in range(3)
        ]

    return run_on_threads(strategy.ranks, rank)


CASES = [  # after training, every schedule predicts in the tests of ``test_engine.py``
    *(("skips", strategy_for(schedule, 3)) for schedule in ("1f1b", "interleaved")),
    ("two-outputs", strategy_for("mp-basic", 3)),
    ("skips", strategy_for("bidirectional", 2, groups=2)),
    # What only training makes is not sent.
    *(("auxiliary", strategy_for(schedule, 2)) for schedule in ("gpipe", "interleaved", "mast")),
]


@pytest.mark.parametrize(("name", "strategy"), CASES, ids=str)
def test_every_placement_gives_the_plain_evaluation(name: str, strategy: Strategy) -> None:
    ranks, plain = predicted(name, strategy), model(name).eval()
    for k in range(len(SIZES)):
        with torch.no_grad():
            expected = plain(images(k))
        outputs = [rank[k][1] for rank in ranks if rank[k][0].targets]
        assert len(outputs) == strategy.groups
        assert all(rank[k][1] is None for rank in ranks if not rank[k][0].targets)
        for output in outputs:
            torch.testing.assert_close(output, expected)


def test_only_the_ends_of_replica_0_want_anything() -> None:
    ranks = predicted("skips", strategy_for("bidirectional", 4))
    assert [rank[0][0] for rank in ranks] == [(True, False), (False, False), (False, False), (False, True)]


def test_predicting_leaves_weights_statistics_and_the_next_step_alone() -> None:
    def state(communicator: Communicator, between: bool) -> dict[str, Any]:
        engine = engine_of(communicator, "skips", strategy_for("1f1b", 2))
        for step in range(2):
            train(engine, [[(images(0), torch.zeros(2))] * 5], step)
            if between:
                engine.predict(Microbatch(images(1) if engine.predict_wants.images else None, None, SIZES[1]))
        return engine.state_dict()

    with_it, without = (run_on_threads(2, state, between)[0]["model"] for between in (True, False))
    torch.testing.assert_close(with_it, without, rtol=0, atol=0)
