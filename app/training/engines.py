"""Build the engine of a strategy: the one place of the application that knows which strategies there are.

Takes a model on the CPU, a loss and the place of this process; returns the engine of a step. A model that is split or
sharded is never on the device as a whole: each rank moves its own stages or parts there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from app.launch.watchdog import Watchdog
from app.settings.optimization import OptimizerSettings
from parallel.build import assemble
from parallel.comm.communicator import Communicator
from parallel.engine.engine import Engine
from parallel.engine.optimizer_step import MakeOptimizer, keep_average
from parallel.offload.copies import Copies
from parallel.offload.host_memory import HostMemory
from parallel.offload.host_optimizer import LR_SCALE
from parallel.schedule.shares import FINE, coarseness
from parallel.stage.stage import Loss
from parallel.strategy import DELAYED, Strategy
from parallel.trace.updated_search import refuse_updating_copies

if TYPE_CHECKING:
    from parallel.engine.fully_sharded import FullyShardedEngine


def build_engine(
    strategy: Strategy,
    model: nn.Module,
    loss: Loss,
    make_optimizer: MakeOptimizer,
    communicator: Communicator,
    *,
    batch: int,
    tile: int | tuple[int, int],
    seed: int,
    device: torch.device,
    autocast: torch.dtype | None = None,
    watchdog: Watchdog | None = None,
    host: HostMemory | None = None,
) -> FullyShardedEngine | Engine:
    """Return the engine that computes ``strategy``.

    Args:
        model: on the CPU, the same on every rank.
        make_optimizer: over the named parameters it is given.
        batch: tiles of a usual step over all ranks.
        tile: px of a usual tile, a side, or height and width; where tiles differ in size, of the largest.
        autocast: type for mixed precision; None computes in the model's own.
        host: where maps of tiles lie that are computed box by box; None: in memory.

    Raises:
        ValueError: the model cannot be split as asked, or the schedule does not fit; async on a GPU.
    """
    if strategy.pushes is not None and device.type != "cpu":
        raise ValueError("--parallel async computes on CPUs, and this machine has a GPU: add --device cpu, or use ddp")
    shape = (-(-batch // strategy.m), 3, *((tile, tile) if isinstance(tile, int) else tile))
    common: dict[str, Any] = {"batch": batch, "seed": seed, "device": device, "autocast": autocast}
    parts = model, loss, make_optimizer, communicator
    if strategy.name == "fsdp":
        from parallel.engine.fully_sharded import FullyShardedEngine  # half a second that other strategies do not need

        refuse_updating_copies(model, shape, communicator, strategy.name)
        offload, recompute = strategy.policy.optimizer, strategy.policy.recompute == "block"
        common |= {"m": strategy.m, "statistics": strategy.statistics, "recompute": recompute}
        return FullyShardedEngine(*parts, offload=Copies.for_device(device) if offload else None, **common)
    return assemble(*parts, strategy, shape=shape, observer=watchdog, host=host, **common)


def choose_algorithms(strategy: Strategy, device: torch.device, *, fixed: bool, limited: bool = False) -> None:
    """Let cuDNN time its algorithms at the first convolution of each shape, and keep the fastest, where that pays.

    It does not where tiles differ in size, or come in boxes. Algorithms that are timed take work space as far as memory
    is free, which is not for runs that save memory; and cuDNN waits for all that the device was given, which a pipeline
    may not: a message may be awaited there that another rank sends later.

    Args:
        fixed: all tiles have one size.
    """
    policy = strategy.policy
    saves = limited or policy.saves or policy.state != "none" or policy.stream is not None
    if device.type == "cuda":
        deterministic = torch.are_deterministic_algorithms_enabled()
        torch.backends.cudnn.benchmark = fixed and not (saves or strategy.splits or deterministic)


def build_optimizer(
    settings: OptimizerSettings,
    parameters: Iterable[tuple[str, nn.Parameter]],
    scales: Mapping[str, float] | None = None,
) -> Optimizer:
    """Return the update rule of ``settings``. Biases and parameters of one dimension, as those of norms, have no weight
    decay unless ``decay_all`` asks for it, as in timm and MONAI.

    Args:
        parameters: (name, parameter), in the order of the model.
        scales: of the learning rate, by name; those that are missing have 1.
    """
    groups: dict[tuple[float, float], dict[str, Any]] = {}
    for name, parameter in parameters:
        scale = (scales or {}).get(name, 1.0)
        decays = settings.decay_all or (parameter.ndim > 1 and name.rpartition(".")[2] != "bias")
        decay = settings.weight_decay if decays else 0.0
        group = {"params": [], "weight_decay": decay} | ({LR_SCALE: scale} if scales else {})
        groups.setdefault((scale, decay), group)["params"].append((name, parameter))
    each = list(groups.values())
    optimizer: Optimizer
    if settings.optimizer == "sgd":
        optimizer = torch.optim.SGD(each, lr=settings.lr, momentum=settings.momentum)
    else:
        optimizer = torch.optim.AdamW(each, lr=settings.lr)
    if settings.ema:
        keep_average(optimizer, settings.ema)
    return optimizer


def strategy_notes(strategy: Strategy) -> Iterator[str]:
    """Yield what the user should know of gradients, and of the shares of groups."""
    counts, groups = [len(share) for share in strategy.shares], strategy.groups
    if strategy.delayed:
        yield f"{strategy.name}: {DELAYED}"
    if strategy.shares:
        yield f"shares of the {strategy.m} microbatches of a step: {', '.join(map(str, counts))}"
    if strategy.rebalanced:
        yield f"the {strategy.m} microbatches of a step are shared by {groups} ranks as their speeds ask for"
    if strategy.m < FINE * groups and (strategy.shares or strategy.rebalanced):
        lost = coarseness(strategy.m, groups)
        yield (
            f"{strategy.m} microbatches for {groups} follow speeds coarsely: even the best shares may take "
            f"{lost:.0%} longer than finer ones would; from --microbatches {FINE * groups} on it is at most "
            f"{coarseness(FINE * groups, groups):.0%}"
        )
