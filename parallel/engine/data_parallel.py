"""Data parallelism: every rank holds the whole model and computes its share of the microbatches.

With one rank this is the plain step with gradient accumulation, which every other strategy is compared with. With
several, torch's DistributedDataParallel averages the gradients in buckets while the last backward still runs.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from parallel.comm.communicator import Communicator, sum_bytes
from parallel.engine.optimizer_step import parameters_and_gradients, state_of
from parallel.engine.own_time import OwnTime
from parallel.engine.parameter_groups import own_state, whole_state
from parallel.engine.step import Microbatch, NonFiniteLoss, StepResult, Wants, measured, read_losses
from parallel.engine.weight_average import swap_average
from parallel.memory.policy import ActivationPolicy
from parallel.offload.host_optimizer import HostOptimizer, nothing, set_learning_rate
from parallel.offload.rng import drawing
from parallel.offload.saved_tensors import SavedTensors
from parallel.schedule.microbatch import microbatch_seed, share_of
from parallel.schedule.shares import Shares
from parallel.stage.batchnorm import running_statistics
from parallel.stage.stage import Loss, SummedLoss, recompute_context
from parallel.streaming.box_sums import BoxSums, Sums
from parallel.streaming.images import whole
from parallel.streaming.streamed_module import StreamedModule
from parallel.trace.norm_gradients import mend_norm_gradients
from parallel.trace.stage_module import Run, SegmentRun, StageModule
from parallel.trace.strided_convolution import mend_strided_convolutions


class DataParallelEngine:
    """One step on a global batch of ``batch`` tiles cut into ``m`` microbatches, shared by all ranks.

    Args:
        module: the whole model, on the device.
        loss: mean over the tiles of a microbatch.
        optimizer: over the named parameters of ``module``.
        communicator: the ranks.
        batch: tiles of a step over all ranks.
        m: microbatches of a step over all ranks.
        seed: of dropout and every other random number the model draws.
        autocast: type for mixed precision on the device; None computes in float32.
        statistics: running statistics of normalisation layers once per microbatch, or deferred to once per step.
        saved_tensors: says what becomes of what forward passes keep. By default autograd keeps it.
        host: ``optimizer`` is the one it has.
        device: that computes, where the parameters are on the host.
        bucket_bytes: of gradients averaged at once beside the last backward pass; 0: all, at its end; None: as the
            communicator does.
        shares: microbatches of each rank, all of them together; empty: consecutive ones, as many for each.

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
        statistics: Literal["per-microbatch", "deferred"] = "per-microbatch",
        saved_tensors: SavedTensors | None = None,
        host: HostOptimizer | None = None,
        device: torch.device | None = None,
        bucket_bytes: int | None = None,
        shares: Shares = (),
    ) -> None:
        if batch < m:
            raise ValueError(
                f"{m} microbatches need a batch of at least {m} tiles, got {batch}: raise --batch or lower "
                "--microbatches"
            )
        mend_norm_gradients()
        mend_strided_convolutions()
        self.module = module
        self.optimizer = optimizer
        self.counted = True
        rank, world = communicator.rank, communicator.world
        self.share: Sequence[int] = shares[rank] if shares else share_of(rank, world, m)
        self._loss = loss
        self._communicator = communicator
        self._batch = batch
        self._m = m
        self._seed = seed
        self._autocast = autocast
        self._device = device or next(module.parameters()).device
        self._host = host
        self._learning_rate = 0.0
        self._before_update = nothing
        self._bucket_bytes = bucket_bytes
        self._replica: Callable[..., Any] | None = self._distributed(module)
        self._statistics = running_statistics(module, communicator, statistics)
        self._saved_tensors = saved_tensors or SavedTensors(ActivationPolicy(), self._device)
        self._time = self._stopwatch()
        self._precision = functools.partial(
            torch.autocast, self._device.type, self._autocast, enabled=self._autocast is not None
        )

    def _distributed(self, module: nn.Module) -> Callable[..., Any]:
        """What forward passes of training go through."""
        return self._communicator.replicate(module, self._bucket_bytes)

    def _stopwatch(self) -> OwnTime:
        return OwnTime(self.module.parameters() if self._communicator.world > 1 else (), self._device)

    def reshare(self, shares: Shares) -> None:
        self.share = shares[self._communicator.rank]

    def wants(self, i: int) -> Wants:
        return Wants(images=True, targets=True)

    def parts(self, shape: tuple[int, ...]) -> tuple[None, None]:
        return None, None

    @property
    def predict_wants(self) -> Wants:
        return Wants(images=True, targets=True)

    def step(self, microbatches: Iterable[Microbatch], step: int, learning_rate: float) -> StepResult:
        self.module.train()
        if self._host is not None:
            self._host.begin_step()
        self._learning_rate = learning_rate
        for parameter in self.module.parameters():
            parameter.grad = None
        self._statistics.begin_step(self._m)
        self._time.begin_step()
        computed = self._compute(microbatches, step)
        self._statistics.end_step()
        table = read_losses(computed, self._m)
        losses, sizes = table
        tiles = int(sizes.sum())
        self._communicator.all_reduce(table)
        assert sizes.sum() == self._batch, "the microbatches of all ranks together are the batch"
        faulty = [i for i, value in enumerate(losses.tolist()) if not math.isfinite(value)]
        if faulty:
            if self._host is not None:
                self._host.rollback()
            raise NonFiniteLoss(faulty, [losses[i].item() for i in faulty])
        if self._host is not None:
            self._host.apply(learning_rate)
        else:
            self._before_update()
            set_learning_rate(self.optimizer, learning_rate)
            self.optimizer.step()
        loss = float(losses @ (sizes / self._batch))
        return StepResult(loss, tiles, self._time.seconds, self._time.waited_s)

    def _compute(self, microbatches: Iterable[Microbatch], step: int) -> dict[int, tuple[Tensor, int]]:
        """Forward and backward of what this rank computes, and the sum of gradients over the ranks; return the mean
        loss and the tiles of each microbatch."""
        source, computed = map(self._time.begun, microbatches), {}
        for i in self.share:
            computed[i] = self._accumulate(i, next(source), step)
            self._time.end(i, summed=self._sums_after(i) and self._communicator.world > 1)
        return computed

    def _sums_after(self, i: int) -> bool:
        """Whether the backward pass of ``i`` sums gradients over the ranks: once a step; the others only add up."""
        return i == self.share[-1]

    def _accumulate(self, i: int, microbatch: Microbatch, step: int) -> tuple[Tensor, int]:
        """Forward and backward of microbatch ``i``; gives its own mean loss and its tiles. Nothing is read from the
        device: that would wait for all it was asked for."""
        assert self._replica is not None, "step after close"
        last = self._sums_after(i)
        waits = contextlib.nullcontext() if last or self._communicator.world == 1 else self._replica.no_sync()  # type: ignore[attr-defined]
        with waits:
            loss = self._forward(i, microbatch, step)
            # DistributedDataParallel divides by the number of ranks; the global mean weighs every tile alike.
            tiles = microbatch.shape[0]
            weight = tiles * self._communicator.world / self._batch
            del microbatch  # its images live on where autograd needs them
            # The mean over several ranks comes after a gradient has been added.
            if last and self._host is not None and self._communicator.world == 1:
                self._host.expect_final_grads(self._learning_rate)
            (loss * weight).backward()  # type: ignore[no-untyped-call]
        self._saved_tensors.release(i)
        return loss.detach(), tiles

    def _forward(self, i: int, microbatch: Microbatch, step: int) -> Tensor:
        """The loss of microbatch ``i``."""
        assert self._replica is not None, "step after close"
        assert microbatch.images is not None
        assert microbatch.targets is not None
        with (
            drawing(microbatch_seed(self._seed, step, i), self._device),
            self._statistics.microbatch(i, microbatch.shape[0]),
            self._precision(),
            contextlib.nullcontext() if self._saved_tensors.idle else self._saved_tensors.watching(i, self._state()),
            self._in_segments(),
        ):
            if isinstance(self.module, StreamedModule) and isinstance(self._loss, SummedLoss):
                asked = BoxSums(self._loss.sums, microbatch.targets)
                return self._loss.value(self._replica(microbatch.images, sums=asked), asked.pixels)
            loss: Tensor = self._loss(self._replica(microbatch.images), whole(microbatch.targets))
        return loss

    @contextlib.contextmanager
    def _in_segments(self) -> Iterator[None]:
        """A model cut into segments is run by ``saved_tensors``."""
        if not isinstance(self.module, StageModule):
            yield
            return
        self.module.run_segment = self._through
        try:
            yield
        finally:
            self.module.run_segment = None

    def _through(self, segment: SegmentRun, compute: Run, values: tuple[Any, ...]) -> tuple[Any, ...]:
        around = functools.partial(recompute_context, segment, self._device, self._statistics, self._precision)
        return self._saved_tensors.run_segment(segment, compute, values, around)

    def _state(self) -> tuple[Tensor, ...]:
        """Parameters and buffers, which are there anyway."""
        return (*self.module.parameters(), *self.module.buffers())

    def predicting(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    @torch.no_grad()
    def predict(self, microbatch: Microbatch, sums: Sums | None = None) -> Tensor:
        self.module.eval()
        with self._precision():
            if sums is not None and isinstance(self.module, StreamedModule):
                assert microbatch.targets is not None
                summed: Tensor = self.module(microbatch.images, sums=BoxSums(sums, microbatch.targets))
                return summed
            output: Tensor = self.module(microbatch.images)
        result: Tensor = measured(output.float(), microbatch, sums)
        return result

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        self._swap_average()
        yield
        self._swap_average()

    def _swap_average(self) -> None:
        self._before_update()
        if self._host is not None:
            self._host.exchange(swap_average)
        else:
            swap_average(self.optimizer)

    def on_device(self) -> Iterator[Tensor]:
        yield from self.module.buffers()
        if self._host is None or not self._host.resident:
            yield from parameters_and_gradients(self.module.parameters())
        if self._host is None:
            yield from state_of(self.optimizer)

    def gradients(self) -> dict[str, Tensor]:
        """Return the gradients of the global batch's mean loss, by name of the parameter; after a step."""
        return {name: p.grad for name, p in self.module.named_parameters() if p.grad is not None}

    @property
    def sent_in_step(self) -> int:
        gradients = sum(p.grad.nbytes for p in self.module.parameters() if p.grad is not None)
        return sum_bytes(gradients, self._communicator.world)

    def before_update(self, call: Callable[[], None]) -> None:
        if self._host is not None:
            self._host.before_update = call
        self._before_update = call

    @property
    def parameter_names(self) -> frozenset[str]:
        return frozenset(name for name, _ in self.module.named_parameters(remove_duplicate=False))

    def state_dict(self) -> dict[str, Any]:
        if self._communicator.rank > 0:
            return {}
        return {"model": self.module.state_dict(), "optimizer": whole_state(self.optimizer, self._names)}

    @property
    def _names(self) -> list[str]:
        """Names of the parameters, in the model's order."""
        return [name for name, _ in self.module.named_parameters()]

    def close(self) -> None:
        self._replica = None
        self._saved_tensors.reset()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.module.load_state_dict(state["model"])
        self.optimizer.load_state_dict(own_state(self.optimizer, state["optimizer"], self._names))
