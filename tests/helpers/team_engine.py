"""An engine of a registered model under a strategy, as tests of planned bytes measure it."""

from __future__ import annotations

import functools
import gc

import torch

from app.settings.optimization import OptimizerSettings
from app.training.engines import build_engine, build_optimizer
from models.losses import PixelClassLoss, TileClassLoss
from models.registry import build_model
from parallel.comm.communicator import Communicator
from parallel.engine.engine import Engine
from parallel.strategy import Strategy


def segments(model: str) -> bool:
    """Whether targets of a model are masks."""
    return model.startswith("unet")


def team_engine(model: str, px: int, strategy: Strategy, communicator: Communicator) -> Engine:
    """AdamW, one tile a microbatch, in channels-last memory; what its making left behind is collected."""
    torch.manual_seed(0)
    engine = build_engine(
        strategy,
        build_model(model, classes=2).to(memory_format=torch.channels_last),
        PixelClassLoss() if segments(model) else TileClassLoss(),
        functools.partial(build_optimizer, OptimizerSettings(lr=1e-3)),
        communicator,
        batch=strategy.m,
        tile=px,
        seed=0,
        device=torch.device("cpu"),
    )
    gc.collect()
    assert isinstance(engine, Engine)
    return engine
