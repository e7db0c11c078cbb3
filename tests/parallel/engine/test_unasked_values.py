"""Parameters that the loss has no gradient for keep none in a split model, wherever it is cut: weight decay would move
them. Values written in place still carry theirs."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD

from parallel.build import assemble
from parallel.comm.communicator import Communicator
from parallel.comm.thread_comm import run_on_threads
from parallel.engine.step import Microbatch
from parallel.graph.partition import cut_positions
from parallel.memory.policy import ActivationPolicy
from parallel.strategy import Strategy
from parallel.trace.trace import trace

SHAPE, M = (2, 3, 8, 8), 2


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3)
        self.second = nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Conv2d(4, 4, 1))
        self.head = nn.Linear(4, 2)


class UnusedBranch(Parts):
    """As encoders of more levels than their decoder takes."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        self.second(x)
        return self.head(x.mean((2, 3)))


class DetachedTrunk(Parts):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(self.first(x)).detach().mean((2, 3)))


class WrittenInPlace(Parts):
    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        both = torch.zeros_like(x)
        both[:, :2] = self.second(x)[:, :2]
        return self.head(both.mean((2, 3)))


def loss(output: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(output, targets)


def tiles() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(SHAPE, generator=generator, dtype=torch.float64), torch.tensor([i, 1])) for i in range(M)]


def optimizer(parameters: object) -> SGD:
    return SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.1)  # type: ignore[arg-type]


@pytest.mark.parametrize("recompute", ["none", "stage", "block"])
@pytest.mark.parametrize("kind", [UnusedBranch, DetachedTrunk, WrittenInPlace])
def test_every_cut_gives_the_plain_update(kind: type[Parts], recompute: str) -> None:
    torch.manual_seed(0)
    model = kind().double()
    plain = copy.deepcopy(model).train()
    update = optimizer(plain.parameters())
    for images, targets in tiles():
        (loss(plain(images), targets) / M).backward()
    update.step()
    assert any(p.grad is None for p in plain.parameters()) == (kind is not WrittenInPlace)
    graph = trace(kind(), SHAPE).graph
    cuts = [graph.layers[position].name for position in cut_positions(graph)]
    assert len(cuts) >= 3
    for cut in cuts:
        models = [copy.deepcopy(model) for _ in range(2)]

        def rank(communicator: Communicator, at: tuple[str, list[Parts]]) -> dict[str, Tensor]:
            cut, models = at
            engine = assemble(
                models[communicator.rank],
                loss,
                optimizer,
                communicator,
                Strategy("1f1b", ranks=2, depth=2, m=M, cuts=(cut,), policy=ActivationPolicy(recompute)),
                shape=SHAPE,
                batch=4,
                device=torch.device("cpu"),
            )
            engine.step([Microbatch(images, targets, SHAPE) for images, targets in tiles()], 0, 0.1)
            state: dict[str, Tensor] = engine.state_dict().get("model", {})
            return state

        found = run_on_threads(2, rank, (cut, models))[0]
        for name, expected in plain.state_dict().items():
            torch.testing.assert_close(found[name], expected, rtol=1e-12, atol=1e-13, msg=f"{name}, cut before {cut}")
