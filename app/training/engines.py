"""From settings to an engine: the one place of the application that knows which strategies there are.

Takes a model on the CPU, a loss and where this process stands; gives what computes a step. A model that is split or
sharded is never on the device as a whole: each rank moves its own stages or parts there.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.optim import Optimizer

from app.launch.watchdog import Watchdog
from app.planning.engine_strategy import keeping_of, stages_of
from app.settings.run import OptimizerSettings
from app.settings.strategy import StrategySettings
from app.settings.strategy_names import TORCH_PIPELINES
from parallel.build import assemble, assemble_torch_pipeline
from parallel.comm.communicator import Communicator
from parallel.engine.data_parallel import DataParallelEngine
from parallel.engine.engine import Engine
from parallel.engine.fully_sharded import FullyShardedEngine
from parallel.engine.optimizer_step import MakeOptimizer
from parallel.memory.policy import SMALLEST
from parallel.offload.copies import Copies
from parallel.offload.host_optimizer import HostOptimizer
from parallel.offload.host_parameters import HostParameters
from parallel.offload.saved_tensors import SavedTensors
from parallel.stage.stage import Loss
from parallel.streaming.streamed_module import streamed
from parallel.trace.trace_alone import updated_alone
from parallel.trace.updated_faults import refuse_copies
from parallel.trace.whole_module import in_segments


def build_engine(
    asked: StrategySettings,
    model: nn.Module,
    loss: Loss,
    make_optimizer: MakeOptimizer,
    communicator: Communicator,
    *,
    tile: int,
    seed: int,
    device: torch.device,
    autocast: torch.dtype | None = None,
    guardian: Watchdog | None = None,
    smallest: int = SMALLEST,
) -> DataParallelEngine | Engine:
    """The engine that ``asked`` asks for.

    Args:
        model: on the CPU, the same on every rank.
        make_optimizer: over the parameters it is given.
        tile: px of a usual tile.
        autocast: type for mixed precision; None computes in the model's own.
        guardian: told of every action.
        smallest: bytes of a tensor that is worth moving to the host.

    Raises:
        ValueError: the model cannot be split as asked, or the schedule does not fit.
    """
    shape = (-(-asked.batch // asked.m), 3, tile, tile)
    if asked.name == "fsdp":
        refuse_copies(updated_alone(model, shape, communicator), communicator.world, asked.name)
        return FullyShardedEngine(
            model,
            loss,
            make_optimizer,
            communicator,
            batch=asked.batch,
            m=asked.m,
            device=device,
            seed=seed,
            autocast=autocast,
            statistics=asked.norm_statistics,
        )
    if not asked.splits:
        return _whole(asked, model, loss, make_optimizer, communicator, shape, seed, device, autocast, smallest)
    start = assemble_torch_pipeline if asked.name in TORCH_PIPELINES else assemble
    engine = start(
        model,
        loss,
        make_optimizer,
        communicator,
        stages_of(asked, device, smallest),
        shape=shape,
        batch=asked.batch,
        seed=seed,
        autocast=autocast,
        device=device,
        observer=guardian,
    )
    if guardian:
        guardian.follow(engine.schedule)
    return engine


def _whole(
    asked: StrategySettings,
    model: nn.Module,
    loss: Loss,
    make_optimizer: MakeOptimizer,
    communicator: Communicator,
    shape: tuple[int, ...],
    seed: int,
    device: torch.device,
    autocast: torch.dtype | None,
    smallest: int,
) -> DataParallelEngine:
    """Each rank computes the whole model."""
    keeping = keeping_of(asked, device, smallest)
    updated = updated_alone(model, shape, communicator)
    refuse_copies(updated, communicator.world, asked.name)
    if keeping.stream is None:
        model = in_segments(model, keeping, shape, communicator)
    else:
        model = streamed(model, keeping.stream, shape, communicator, keeping.host_bytes)
    keeper = SavedTensors(keeping, device)
    if keeping.parameters:
        keeper.streams(HostParameters(model, device, Copies.for_device(device)))
    else:
        model.to(device)
    host = None
    if keeping.optimizer:
        copies = Copies.for_device(device)
        host = HostOptimizer(make_optimizer, dict(model.named_parameters()), copies, resident=keeping.parameters)
    return DataParallelEngine(
        model,
        loss,
        host.optimizer if host else make_optimizer(model.parameters()),
        communicator,
        batch=asked.batch,
        m=asked.m,
        seed=seed,
        autocast=autocast,
        statistics=asked.norm_statistics,
        keeper=keeper,
        host=host,
        device=device,
        bucket_bytes=asked.bucket_bytes,
        updated=updated if keeping.segmented or keeping.offload != "none" else (),
    )


def build_optimizer(settings: OptimizerSettings, parameters: Iterable[nn.Parameter]) -> Optimizer:
    """The update rule of ``settings`` over ``parameters``."""
    if settings.optimizer == "sgd":
        return torch.optim.SGD(
            parameters, lr=settings.lr, momentum=settings.momentum, weight_decay=settings.weight_decay
        )
    return torch.optim.AdamW(parameters, lr=settings.lr, weight_decay=settings.weight_decay)
