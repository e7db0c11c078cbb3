"""Ranks that draw their microbatches: the plain step, whoever computed what, over every kind of ranks."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parallel.comm.communicator import Communicator
from parallel.engine.step import Microbatch, NonFiniteLoss
from parallel.engine.tickets import DrawnMicrobatches, TicketEngine
from parallel.schedule.microbatch import microbatch_seed, split_batch
from tests.helpers.ranks import run_on_ranks

BATCH, M, SEED, STEPS = 13, 9, 3, 4
TOLERANCE = {"float64": 1e-10, "float32": 1e-5}


def net(dtype: str) -> nn.Module:
    model = nn.Sequential(
        nn.Conv2d(3, 6, 3, bias=False),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.Dropout(0.3),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(6, 3),
    )
    generator = torch.Generator().manual_seed(5)  # threads share the one that layers draw from
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3, generator=generator)
    return model.to(getattr(torch, dtype))


def tiles(dtype: str, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    images = torch.randn(BATCH, 3, 9, 9, generator=generator, dtype=getattr(torch, dtype))
    return images, torch.randint(0, 3, (BATCH,), generator=generator)


class Drawn:
    """Microbatches of a step; ranks take uneven times for them, so that all draw from all."""

    def __init__(self, dtype: str, step: int) -> None:
        self._images, self._labels = tiles(dtype, step)
        self.taken: list[int] = []

    def take(self, i: int) -> Microbatch:
        time.sleep(random.uniform(0, 0.004))
        self.taken.append(i)
        part = split_batch(BATCH, M)[i]
        images = self._images[part.start : part.stop]
        return Microbatch(images, self._labels[part.start : part.stop], tuple(images.shape))


def drawn_run(communicator: Communicator, dtype: str) -> dict[str, Any]:
    model = net(dtype)
    rule = torch.optim.SGD(model.named_parameters(), lr=0.1, momentum=0.9)
    engine = TicketEngine(model, F.cross_entropy, rule, communicator, batch=BATCH, m=M, seed=SEED)
    losses, taken = [], []
    for step in range(STEPS):
        drawn = Drawn(dtype, step)
        result = engine.step(DrawnMicrobatches(engine.share, drawn.take), step, 0.1)
        losses.append(result.loss)
        taken.append(drawn.taken)
        assert [i for i, _ in result.seconds] == drawn.taken
    gradients = {name: value.clone() for name, value in engine.gradients().items()}
    state = {name: value.clone() for name, value in model.state_dict().items()}
    drawn = Drawn(dtype, 0)
    drawn._images[-1] = float("nan")
    with pytest.raises(NonFiniteLoss) as caught:
        engine.step(DrawnMicrobatches(engine.share, drawn.take), 0, 0.1)
    assert caught.value.microbatches == [M - 1]
    engine.close()
    return {"losses": losses, "taken": taken, "gradients": gradients, "state": state}


def both_types(communicator: Communicator, _: Any) -> dict[str, Any]:
    return {dtype: drawn_run(communicator, dtype) for dtype in TOLERANCE}


def plain_run(dtype: str) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
    model = net(dtype)
    rule = torch.optim.SGD(model.named_parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(STEPS):
        images, labels = tiles(dtype, step)
        rule.zero_grad()
        total = 0.0
        for i, part in enumerate(split_batch(BATCH, M)):
            torch.manual_seed(microbatch_seed(SEED, step, i))
            loss = F.cross_entropy(model(images[list(part)]), labels[list(part)]) * (len(part) / BATCH)
            loss.backward()
            total += loss.item()
        gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        rule.step()
        losses.append(total)
    return losses, gradients, {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize(
    ("launcher", "world"),
    [
        ("threads", 1),
        ("threads", 3),
        pytest.param("forked", 2, marks=pytest.mark.process),
        pytest.param("mpi", 3, marks=pytest.mark.process),
    ],
)
def test_drawn_microbatches_make_the_plain_step(launcher: Any, world: int, tmp_path: Path) -> None:
    ranks = run_on_ranks(world, "tests.parallel.engine.test_tickets:both_types", tmp_path, launcher=launcher)
    for dtype, tolerance in TOLERANCE.items():
        losses, gradients, state = plain_run(dtype)
        for step in range(STEPS):
            assert sorted(i for rank in ranks for i in rank[dtype]["taken"][step]) == list(range(M))
        for rank in ranks:
            assert rank[dtype]["losses"] == pytest.approx(losses, rel=tolerance)
            for name, value in gradients.items():
                difference = (value - rank[dtype]["gradients"][name]).abs().max()
                assert difference <= tolerance * value.abs().max(), name
            for name, value in state.items():
                assert torch.equal(ranks[0][dtype]["state"][name], rank[dtype]["state"][name]), f"ranks differ: {name}"
                assert (value - rank[dtype]["state"][name]).abs().max() <= tolerance * max(1, value.abs().max()), name


class Late(nn.Module):
    """Backward passes take ``seconds``."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self._seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layer(x.mean(dim=(2, 3)))
        output.register_hook(lambda _: time.sleep(self._seconds))
        return output


def beside_a_late_rank(communicator: Communicator, _: Any) -> list[int]:
    """Which microbatches this rank draws where rank 0 is so late that it is at its first when all others are done."""
    model = Late(1.5 if communicator.rank == 0 else 0.0)
    rule = torch.optim.SGD(model.named_parameters(), lr=0.1)
    engine = TicketEngine(model, F.cross_entropy, rule, communicator, batch=BATCH, m=M, seed=SEED)
    drawn = Drawn("float32", 0)
    engine.step(DrawnMicrobatches(engine.share, drawn.take), 0, 0.1)
    return drawn.taken


def test_others_compute_what_a_late_rank_has_not_begun(tmp_path: Path) -> None:
    target = "tests.parallel.engine.test_tickets:beside_a_late_rank"
    late, *others = run_on_ranks(3, target, tmp_path, launcher="threads")
    assert late == [0]
    assert sorted(i for rank in others for i in rank) == list(range(1, M))
