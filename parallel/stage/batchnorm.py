"""Running statistics of normalisation layers, exact whoever computes which microbatch in which order.

Takes a module and the ranks that hold a copy of it. ``OrderedStatistics`` gives what the plain step gives: one update
per microbatch, in microbatch order; ``deferred_batchnorm`` has the other way. A pass that is not to update the layers
itself starts from zeros and is put back after; what it left is kept.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.instancenorm import _InstanceNorm

from parallel.comm.communicator import Communicator
from parallel.stage.deferred_batchnorm import DeferredStatistics
from parallel.stage.running_buffers import (
    buffers_of,
    channels_of,
    clear_buffers,
    exchanged_records,
    untouched,
)
from parallel.trace.updated_search import tracking_layers


class RunningStatistics(Protocol):
    """The running statistics of one module, kept right over a step; no layer of another module is touched."""

    def begin_step(self, m: int) -> None:
        """Begin a step of ``m`` microbatches over all ranks. Layers now in training mode take part."""
        ...

    def microbatch(self, i: int, tiles: int) -> AbstractContextManager[None]:
        """Return a context for the forward pass of microbatch ``i`` of ``tiles`` tiles, numbered over all ranks; in any
        order."""
        ...

    def frozen(self, within: Container[nn.Module] | None = None) -> AbstractContextManager[None]:
        """Return a context for a recomputed forward pass: its outputs are the same, and nothing is counted.

        Args:
            within: modules of which some are computed; None: all.
        """
        ...

    def end_step(self) -> None:
        """Bring the statistics of every rank to those after the step; all ranks call it."""
        ...


def running_statistics(
    module: nn.Module, communicator: Communicator, mode: Literal["per-microbatch", "deferred"], told: bool = True
) -> RunningStatistics:
    """Return the running statistics of ``module``, of which every rank of ``communicator`` holds a copy.

    Args:
        told: what this rank's passes leave counts; of a team, whose members all find the same, that is one rank.

    Raises:
        ValueError: ``deferred`` with layers other than BatchNorm1d, 2d and 3d.
    """
    if mode == "deferred":
        return DeferredStatistics(module, communicator)
    return OrderedStatistics(module, communicator, told)


class OrderedStatistics:
    """Running statistics updated once per microbatch, in microbatch order.

    With momentum a, one update is r <- (1 - a) r + a s. Started from r = 0 it leaves exactly the addend a s, whatever
    the kind of layer, and ranks exchange addends. ``momentum=None`` keeps the mean over all updates: started from
    nothing it leaves the mean over this microbatch's.

    Args:
        module: its layers that track running statistics take part while they are in training mode.
        communicator: the ranks that hold a copy of ``module``.
        told: this rank tells the others what its passes leave.
    """

    def __init__(self, module: nn.Module, communicator: Communicator, told: bool = True) -> None:
        self._told = told
        self._layers = tracking_layers(module)
        self._communicator = communicator

    def begin_step(self, m: int) -> None:
        """Begin a step of ``m`` microbatches over all ranks, for the layers now in training mode."""
        self._active = [layer for layer in self._layers if layer.training]
        self._m = m
        self._next = 0
        self._records: dict[int, Tensor] = {}

    @contextmanager
    def microbatch(self, i: int, tiles: int) -> Iterator[None]:
        """Let layers update themselves while the block runs in the right order, else record their addends."""
        # A rank that has all microbatches lets the layers update themselves for as long as the order is right.
        if not self._active or (self._communicator.world == 1 and i == self._next):
            yield
            self._next = i + 1
        else:
            with untouched(self._active), _counted(self._active):
                for layer in self._active:
                    clear_buffers(layer)
                yield
                if self._told:
                    self._records[i] = torch.cat([_flat(layer) for layer in self._active])
        if self._communicator.world == 1:
            while self._next in self._records:
                self._replay(self._records.pop(self._next))
                self._next += 1

    def frozen(self, within: Container[nn.Module] | None = None) -> AbstractContextManager[None]:
        """Return a context that leaves no trace of a recomputed pass in the layers, those of ``within`` where given."""
        return untouched([layer for layer in self._active if within is None or layer in within])

    def end_step(self) -> None:
        """Update the layers with what all ranks recorded, in microbatch order; all ranks call it."""
        if not self._active:
            return
        if self._communicator.world == 1:
            assert not self._records, f"microbatch {self._next} of {self._m} is missing"
            return
        for record in exchanged_records(self._records, self._m, self._active, self._communicator):
            self._replay(record)

    def _replay(self, record: Tensor) -> None:
        """Update every layer by what one microbatch left behind."""
        addends = torch.split(record, [2 * channels_of(layer) + 1 for layer in self._active])
        counts = torch.stack([addend[-1] for addend in addends]).tolist()
        for layer, addend, count in zip(self._active, addends, counts, strict=True):
            mean, variance = addend[:-1].chunk(2)
            if not count:
                continue
            running_mean, running_variance, updates = buffers_of(layer)
            if not isinstance(layer, _InstanceNorm):
                updates.add_(int(count))
            if layer.momentum is not None:
                keep, add = (1 - layer.momentum) ** count, 1.0
            elif isinstance(layer, _InstanceNorm):  # never updated: torch takes None for 0 there
                keep, add = 1.0, 0.0
            else:
                add = count / int(updates)
                keep = 1 - add
            running_mean.mul_(keep).add_(mean, alpha=add)
            running_variance.mul_(keep).add_(variance, alpha=add)


def _flat(layer: _NormBase) -> Tensor:
    """Return running mean, running variance and the number of updates in one vector (2 C + 1), float64."""
    mean, variance, updates = buffers_of(layer)
    return torch.cat([mean.double(), variance.double(), updates.double()[None]])


@contextmanager
def _counted(layers: list[_NormBase]) -> Iterator[None]:
    """Count the updates of InstanceNorm layers too, which do not do so themselves."""

    def count(layer: nn.Module, inputs: Any, output: Any) -> None:
        assert isinstance(layer, _NormBase)
        buffers_of(layer)[2].add_(1)

    hooks = [layer.register_forward_hook(count) for layer in layers if isinstance(layer, _InstanceNorm)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
