"""From settings to an engine: the one place of the application that knows which strategies there are.

Takes a model on the CPU, a loss and where this process stands; gives what computes a step. A model that is split is
never on the device as a whole: each rank moves its own stages there.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.optim import Optimizer

from app.config import OptimizerSettings, RunConfig
from app.launch import Placement
from app.strategy import StrategySettings
from parallel.data_parallel import DataParallelEngine
from parallel.guardian import Guardian
from parallel.step import Loss, TrainingEngine

if TYPE_CHECKING:
    from parallel.assemble import Strategy


def build_engine(
    config: RunConfig, model: nn.Module, loss: Loss, placement: Placement, guardian: Guardian
) -> TrainingEngine:
    """The engine that ``config`` asks for.

    Args:
        guardian: told of every action.

    Raises:
        ValueError: the model cannot be split as asked, or the schedule does not fit.
    """
    asked = config.strategy
    make_optimizer = functools.partial(build_optimizer, config.optimization)
    if not asked.splits:
        model.to(placement.device)
        return DataParallelEngine(
            model,
            loss,
            make_optimizer(model.parameters()),
            placement.communicator,
            batch=asked.batch,
            m=asked.m,
            seed=config.seed,
            autocast=placement.autocast,
        )
    from parallel.assemble import assemble

    tile = config.index.tile
    engine = assemble(
        model,
        loss,
        make_optimizer,
        placement.communicator,
        stages_of(config.strategy),
        shape=(-(-asked.batch // asked.m), 3, tile, tile),
        batch=asked.batch,
        seed=config.seed,
        autocast=placement.autocast,
        device=placement.device,
        observer=guardian,
    )
    guardian.follow(engine.schedule)
    return engine


def stages_of(asked: StrategySettings) -> Strategy:
    """The settings as the engine's own; of a strategy that splits the model."""
    from parallel.assemble import Strategy

    return Strategy(
        asked.name,
        ranks=asked.world,
        depth=asked.depth,
        m=asked.m,
        chunks=(asked.chunks or 2) if asked.name == "interleaved" else 1,
        cuts=tuple(cut.strip() for cut in asked.cuts.split(",") if cut.strip()),
        schedule_csv=asked.schedule.read_text() if asked.schedule else None,
        recompute=asked.recompute == "stage",
        shard_optimizer=asked.shard_optimizer == "pair",
        statistics=asked.norm_statistics,
        compile=asked.compile,
    )


def build_optimizer(settings: OptimizerSettings, parameters: Iterable[nn.Parameter]) -> Optimizer:
    """The update rule of ``settings`` over ``parameters``."""
    if settings.optimizer == "sgd":
        return torch.optim.SGD(
            parameters, lr=settings.lr, momentum=settings.momentum, weight_decay=settings.weight_decay
        )
    return torch.optim.AdamW(parameters, lr=settings.lr, weight_decay=settings.weight_decay)
