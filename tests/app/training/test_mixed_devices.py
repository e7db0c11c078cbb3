"""Data parallelism of ranks on CPUs and GPUs, by the engine of a run: the plain step, and models that are refused.

The GPUs are stand-ins: ranks on the CPU that the table of devices calls otherwise.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from app.training.engines import build_engine
from app.training.exactness import TOLERANCE, Errors, ExactnessTrial, MeasuredEngine, verify_engine
from app.training.model import refuse_draws
from models.registry import build_model
from parallel.comm.communicator import Communicator
from parallel.comm.kinds import RankKind
from parallel.comm.mixed_comm import MixedCommunicator, Way
from parallel.comm.thread_comm import run_on_threads
from parallel.schedule.shares import split_batch
from parallel.strategy import Strategy

KINDS = [RankKind("a", "cuda", "0"), RankKind("a", "cpu")]
CPU = torch.device("cpu")
BATCH = 7


@pytest.mark.parametrize("way", ["host", "device"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_shares_of_unequal_devices_are_the_plain_step(way: Way, dtype: torch.dtype) -> None:
    strategy = Strategy("ddp", 2, 1, 4, shares=((0, 1, 2), (3,)))
    torch.manual_seed(0)
    sizes = tuple(map(len, split_batch(BATCH, strategy.m)))
    model = build_model("resnet11_v2", classes=3)
    trial = ExactnessTrial(model, sizes, 32, dtype, CPU, 3 if dtype == torch.float64 else 1)
    make_engine = functools.partial(build_engine, strategy, batch=BATCH, tile=32, seed=0, device=CPU)

    engines: dict[int, MeasuredEngine] = {}

    def run(inner: Communicator, _: object) -> Errors | None:
        def make(*given: Any) -> MeasuredEngine:
            return engines.setdefault(inner.rank, make_engine(*given))

        return verify_engine(trial, make, MixedCommunicator(inner, KINDS, way))

    errors = run_on_threads(2, run)[0]
    assert errors is not None
    assert errors.largest <= TOLERANCE[dtype]
    for name, gradient in engines[0].gradients().items():
        assert torch.equal(gradient, engines[1].gradients()[name]), name


class Attending(nn.Module):
    """Attention that could drop."""

    def __init__(self, drops: float) -> None:
        super().__init__()
        self.drops = drops

    def forward(self, images: Tensor) -> Tensor:
        (queries,) = (images.flatten(2),)
        return F.scaled_dot_product_attention(queries, queries, queries, dropout_p=self.drops)


class Looking(nn.Module):
    """Goes by its values."""

    def forward(self, images: Tensor) -> Tensor:
        return images if images.sum() > 0 else -images


@pytest.mark.parametrize("model", [nn.Dropout(0.0), nn.ReLU(), nn.BatchNorm2d(3), Attending(0.0)])
def test_models_that_draw_nothing_are_taken(model: nn.Module) -> None:
    model.eval()
    refuse_draws(model, (2, 3, 8, 8))
    assert not model.training


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (nn.Dropout(0.5), r"draws random numbers \(\w+\), and a CPU and a GPU draw others from one seed"),
        (nn.RReLU(), r"draws random numbers \(rrelu\w*\)"),
        (Attending(0.1), "draws random numbers"),
        (Looking(), "could not be looked into for random numbers"),
    ],
)
def test_models_that_draw_or_hide_it_are_refused(model: nn.Module, reason: str) -> None:
    state = torch.get_rng_state()
    with pytest.raises(ValueError, match=f"--device mixed: the model {reason}"):
        refuse_draws(model, (2, 3, 8, 8))
    assert torch.equal(state, torch.get_rng_state())
