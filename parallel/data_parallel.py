"""Data parallelism: every rank holds the whole model and computes its share of the microbatches.

With one rank this is the plain step with gradient accumulation, which every other strategy is compared with. With
several, torch's DistributedDataParallel averages the gradients in buckets while the last backward still runs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from parallel.batchnorm import OrderedStatistics
from parallel.comm.communicator import Communicator
from parallel.step import Loss, NonFiniteLoss, StepResult, set_learning_rate
from parallel.microbatch import microbatch_seed, share_of, split_batch


class DataParallelEngine:
    """One step on a global batch of ``batch`` tiles cut into ``m`` microbatches, shared by all ranks.

    Args:
        module: the whole model, on the device.
        loss: mean over the tiles of a microbatch.
        optimizer: over the parameters of ``module``.
        communicator: the ranks.
        batch: tiles of a step over all ranks.
        m: microbatches of a step over all ranks.
        seed: of dropout and every other random number the model draws.
        autocast: type for mixed precision on the device; None computes in float32.

    Raises:
        ValueError: ``batch``, ``m`` and the number of ranks do not fit together.
    """

    def __init__(
        self,
        module: nn.Module,
        loss: Loss,
        optimizer: Optimizer,
        communicator: Communicator,
        *,
        batch: int,
        m: int,
        seed: int = 0,
        autocast: torch.dtype | None = None,
    ) -> None:
        self.module = module
        self.optimizer = optimizer
        self._loss = loss
        self._communicator = communicator
        self._sizes = [len(tiles) for tiles in split_batch(batch, m)]
        self._mine = share_of(communicator.rank, communicator.world, m)
        self._batch = batch
        self._seed = seed
        self._autocast = autocast
        self._device = next(module.parameters()).device
        self._replica: nn.Module | None = communicator.replicate(module)
        self._statistics = OrderedStatistics(module, communicator, m) if communicator.world > 1 else None

    def step(self, microbatches: Iterable[tuple[Tensor, Tensor]], step: int, learning_rate: float) -> StepResult:
        self.module.train()
        self.optimizer.zero_grad(set_to_none=True)
        losses = torch.zeros(len(self._sizes), dtype=torch.float64)
        if self._statistics:
            self._statistics.begin_step()
        tiles = 0
        for i, (images, targets) in zip(self._mine, microbatches, strict=True):
            assert len(images) == self._sizes[i]
            torch.manual_seed(microbatch_seed(self._seed, step, i))
            losses[i] = self._accumulate(i, images, targets)
            tiles += len(images)
        if self._statistics:
            self._statistics.end_step()
        self._communicator.all_reduce(losses)
        faulty = [i for i, value in enumerate(losses.tolist()) if not torch.isfinite(torch.tensor(value))]
        if faulty:
            raise NonFiniteLoss(faulty, [losses[i].item() for i in faulty])
        set_learning_rate(self.optimizer, learning_rate)
        self.optimizer.step()
        weights = torch.tensor(self._sizes, dtype=torch.float64) / self._batch
        return StepResult(loss=float(losses @ weights), tiles=tiles)

    def _accumulate(self, i: int, images: Tensor, targets: Tensor) -> Tensor:
        """Forward and backward of microbatch ``i``; its own mean loss is returned, on the CPU."""
        if self._statistics:
            self._statistics.begin_microbatch(i)
        assert self._replica is not None, "step after close"
        last = i == self._mine[-1]
        # Gradients are exchanged once a step, by the last backward; the others only add up locally.
        waits = contextlib.nullcontext() if last or self._communicator.world == 1 else self._replica.no_sync()  # type: ignore[operator]
        with waits:
            with torch.autocast(self._device.type, self._autocast, enabled=self._autocast is not None):
                loss = self._loss(self._replica(images), targets)
            # DistributedDataParallel divides by the number of ranks; the global mean weighs every tile alike.
            (loss * (self._sizes[i] * self._communicator.world / self._batch)).backward()  # type: ignore[no-untyped-call]
        if self._statistics:
            self._statistics.end_microbatch(i)
        return loss.detach().cpu()

    @torch.no_grad()
    def predict(self, images: Tensor) -> Tensor:
        self.module.eval()
        with torch.autocast(self._device.type, self._autocast, enabled=self._autocast is not None):
            output: Tensor = self.module(images)
        return output.float()

    def state_dict(self) -> dict[str, Any]:
        return {"model": self.module.state_dict(), "optimizer": self.optimizer.state_dict()}

    def close(self) -> None:
        self._replica = None

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.module.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
