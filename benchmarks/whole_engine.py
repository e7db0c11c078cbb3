"""Build engines from a model and a loss: of a strategy, and the one in which every rank computes the whole model."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from parallel.build import assemble
from parallel.comm.communicator import Communicator
from parallel.engine.engine import Engine
from parallel.engine.optimizer_step import MakeOptimizer
from parallel.offload.packing import ActivationMeter
from parallel.stage.stage import Loss
from parallel.strategy import Strategy

CPU = torch.device("cpu")


def cpu_engine(
    model: nn.Module,
    loss: Loss,
    make_optimizer: MakeOptimizer,
    communicator: Communicator,
    strategy: Strategy,
    shape: tuple[int, ...],
    batch: int,
    meter: ActivationMeter | None = None,
) -> Engine:
    """Return the engine of ``strategy`` on a CPU; ``shape`` (n, 3, h, w) is that of a usual microbatch."""
    sizes: Any = {"shape": shape, "batch": batch, "device": CPU}
    return assemble(model, loss, make_optimizer, communicator, strategy, **sizes, meter=meter)


def whole_engine(
    model: nn.Module,
    loss: Loss,
    make_optimizer: MakeOptimizer,
    communicator: Communicator,
    *,
    batch: int,
    m: int,
    shape: tuple[int, ...] = (1, 3, 12, 12),
    device: torch.device = CPU,
    seed: int = 0,
    autocast: torch.dtype | None = None,
    meter: ActivationMeter | None = None,
    **strategy: Any,
) -> Engine:
    """Return the engine of ``single`` on one rank, of ``ddp`` on several.

    Args:
        shape: (n, 3, h, w) of a usual microbatch.
        strategy: further fields of ``Strategy``.
    """
    name = "single" if communicator.world == 1 else "ddp"
    return assemble(
        model,
        loss,
        make_optimizer,
        communicator,
        Strategy(name, communicator.world, 1, m, **strategy),
        shape=shape,
        batch=batch,
        device=device,
        seed=seed,
        autocast=autocast,
        meter=meter,
    )
