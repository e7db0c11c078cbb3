"""Each loss that a run may minimise, under strategies that cut the batch, the model or the tile: the plain step's."""

from __future__ import annotations

import functools

import pytest
import torch

from app.training.engines import build_engine
from app.training.exactness import ExactnessTrial, verify_engine
from models.losses import PixelClassLoss
from models.unet import UNet
from parallel.comm.thread_comm import run_on_threads
from parallel.memory.policy import ActivationPolicy
from parallel.strategy import Strategy

CPU = torch.device("cpu")
WEIGHTS = torch.tensor([0.5, 2.0, 1.0])
LOSSES = {
    "cross entropy": PixelClassLoss(WEIGHTS, dice=False, label_smoothing=0.1),
    "dice": PixelClassLoss(WEIGHTS, label_smoothing=0.1),
    "focal": PixelClassLoss(WEIGHTS, dice=False, gamma=2.0),
}
SIZES = (2, 1, 1)
"""Of microbatches: three over two ranks are shares of 3 tiles and 1."""

STRATEGIES = {
    "ddp": Strategy("ddp", 2, 1, 3),
    "1f1b": Strategy("1f1b", 2, 2, 3),
    "ddp in boxes": Strategy("ddp", 2, 1, 3, policy=ActivationPolicy(stream=24)),
    "1f1b in boxes": Strategy("1f1b", 2, 2, 3, policy=ActivationPolicy(stream=24)),
}


@pytest.mark.parametrize(
    ("loss", "strategies"),
    [
        ("dice", ("ddp", "1f1b in boxes")),
        ("cross entropy", ("1f1b",)),
        ("focal", ("ddp",)),
        pytest.param("focal", ("ddp in boxes",), marks=pytest.mark.long),
    ],
)
def test_a_loss_is_that_of_the_plain_step(loss: str, strategies: tuple[str, ...]) -> None:
    torch.manual_seed(0)
    trial = ExactnessTrial(
        UNet(classes=3, norm="frozen", base=4, depth=2),
        SIZES,
        40,
        torch.float64,
        CPU,
        steps=1,
        loss=LOSSES[loss],
        classes=3,
    )
    for name in strategies:
        make = functools.partial(build_engine, STRATEGIES[name], batch=sum(SIZES), tile=40, seed=trial.seed, device=CPU)
        errors = run_on_threads(2, lambda c, _, make=make: verify_engine(trial, make, c), timeout_s=60)[0]
        assert errors is not None
        assert errors.largest <= 1e-10, name
