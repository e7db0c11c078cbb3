"""Running statistics of normalisation layers, exact whoever computes which microbatch in which order.

Takes a module and the ranks that hold a copy of it. ``OrderedStatistics`` gives what the plain step gives: one update
per microbatch, in microbatch order; ``deferred_batchnorm`` has the other way. A pass that is not to update the layers
itself starts from zeros and is put back after; what it left is kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.instancenorm import _InstanceNorm

from parallel.comm.communicator import Communicator
from parallel.stage.deferred_batchnorm import DeferredStatistics
from parallel.stage.running_buffers import RunningStatistics, buffers_of, untouched


def running_statistics(
    module: nn.Module, communicator: Communicator, mode: Literal["per-microbatch", "deferred"], contributes: bool = True
) -> RunningStatistics:
    """Return the running statistics of ``module``, of which every rank of ``communicator`` holds a copy.

    Args:
        contributes: this rank's passes are recorded; of a team, whose members all find the same, that is one rank.

    Raises:
        ValueError: ``deferred`` with layers other than BatchNorm1d, 2d and 3d.
    """
    if mode == "deferred":
        return DeferredStatistics(module, communicator)
    return OrderedStatistics(module, communicator, contributes)


class OrderedStatistics(RunningStatistics):
    """Running statistics updated once per microbatch, in microbatch order.

    With momentum a, one update is r <- (1 - a) r + a s. Started from r = 0 it leaves exactly the addend a s, whatever
    the kind of layer, and ranks exchange addends. ``momentum=None`` keeps the mean over all updates: started from
    nothing it leaves the mean over this microbatch's.

    Args:
        module: its layers that track running statistics take part while they are in training mode.
        communicator: the ranks that hold a copy of ``module``.
        contributes: this rank sends the others what its passes leave.
    """

    def __init__(self, module: nn.Module, communicator: Communicator, contributes: bool = True) -> None:
        super().__init__(module, communicator)
        self._contributes = contributes

    def begin_step(self, m: int) -> None:
        super().begin_step(m)
        self._next = 0

    @contextmanager
    def microbatch(self, i: int, tiles: int) -> Iterator[None]:
        """Let layers update themselves while the block runs in the right order, else record their addends."""
        # A rank that has all microbatches lets the layers update themselves for as long as the order is right.
        if self._flat is None or (self._communicator.world == 1 and i == self._next):
            yield
            self._next = i + 1
        else:
            with untouched(self._active, self._flat), _counted(self._active):
                self._flat.clear()
                yield
                if self._contributes:
                    values, updates = self._flat.read()
                    self._records[i] = torch.cat([values.double(), updates.double()])
        if self._communicator.world == 1:
            while self._flat is not None and self._next in self._records:
                self._replay(*self._flat.exchanged({0: self._records.pop(self._next)}, 1, self._communicator))
                self._next += 1

    def end_step(self) -> None:
        """Update the layers with what all ranks recorded, in microbatch order; all ranks call it."""
        if self._flat is None:
            return
        if self._communicator.world == 1:
            assert not self._records, f"microbatch {self._next} of {self._m} is missing"
            return
        self._replay(*self._flat.exchanged(self._records, self._m, self._communicator))

    def _replay(self, addends: Tensor, counts: Tensor) -> None:
        """Update every layer by what microbatches left behind, in order: (m, 2 S) addends of (m, L) updates.

        The chain r <- (1 - a)^n_i r + s_i has the closed form (1 - a)^(n_1 + ... + n_m) r + sum of
        (1 - a)^(n_(i+1) + ... + n_m) s_i.
        """
        flat = self._flat
        assert flat is not None
        values, updates = flat.read()
        total = counts.sum(0)
        # InstanceNorm never counts its updates, and takes momentum=None for 0.
        instance = [isinstance(layer, _InstanceNorm) for layer in flat.layers]
        cumulative = [
            layer.momentum is None and not of_instance for layer, of_instance in zip(flat.layers, instance, strict=True)
        ]
        base = flat.constant(*(1 - (layer.momentum or 0.0) for layer in flat.layers))
        keep, weights = base**total, base ** (total - counts.cumsum(0))
        if any(cumulative):
            of_mean = flat.constant(*map(float, cumulative)) > 0
            all_updates = (updates + total).clamp(min=1)
            keep = torch.where(of_mean, 1 - total / all_updates, keep)
            weights = torch.where(of_mean, counts / all_updates, weights)
        values = values.double() * flat.spread(keep) + (addends * flat.spread(weights)).sum(0)
        counted = flat.constant(*(float(not of_instance) for of_instance in instance))
        flat.write(values, updates + (total * counted).long())


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
