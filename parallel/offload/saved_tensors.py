"""Applies a rank's activation policy to what its forward passes save: offload, recomputation, or neither.

Takes an ``ActivationPolicy``; a stage runs its forward passes under ``watching`` and its segments through
``run_segment``. Nothing here knows schedules: others say when a microbatch is flushed or fetched.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from parallel.memory.policy import ActivationPolicy
from parallel.offload.copies import Copies
from parallel.offload.host_memory import HostMemory
from parallel.offload.host_parameters import HostParameters
from parallel.offload.overlap import MicrobatchSaves, OverlapOffload
from parallel.offload.packing import ActivationMeter, Packer, SavedTensor, put_away, saving, storages_of
from parallel.offload.recompute import CheckpointedSegment
from parallel.trace.stage_module import SegmentRun

RecomputeContext = Callable[[SegmentRun], contextlib.AbstractContextManager[Any]]
"""Called before a segment is computed: gives what it is recomputed in, once."""


class SavedTensors:
    """Saved tensors of all stages of a rank, as its policy says.

    Args:
        rule: what is to be done.
        device: of the rank.
        meter: counts the bytes of activations on the device.
        copies: of the device, where others use them too.

    Attributes:
        pool: host memory, with overlap.
    """

    def __init__(
        self,
        rule: ActivationPolicy,
        device: torch.device,
        *,
        meter: ActivationMeter | None = None,
        copies: Copies | None = None,
    ) -> None:
        self.rule = rule
        self.pool: HostMemory | None = None
        self.copies = copies or Copies.for_device(device)
        self._meter = meter
        self._keep_on_device: Packer = functools.partial(SavedTensor, meter=meter)
        self._overlap: OverlapOffload | None = None
        if rule.moves:
            self.pool = HostMemory(self.copies, rule.host_bytes)
            self._overlap = OverlapOffload(
                self.copies, self.pool, ahead=rule.ahead, smallest=rule.smallest, meter=meter
            )
        self._saves: dict[Any, MicrobatchSaves] = {}
        self._hosts: list[HostParameters] = []
        # Of the forward pass under way.
        self._packer: Packer = self._keep_on_device
        self._state: set[int] = set()

    def streams(self, host: HostParameters) -> None:
        """Forward passes use parameters of ``host``, of which nothing is kept on the device."""
        self._hosts.append(host)

    @property
    def idle(self) -> bool:
        """Return whether autograd keeps everything on the device, and no meter counts it."""
        recomputes = self.rule.segmented or self.rule.stagewise
        return not (self.rule.moves or recomputes or self._meter is not None or self._hosts)

    @contextlib.contextmanager
    def watching(self, key: Any, state: Iterable[Tensor]) -> Iterator[None]:
        """Return a context for the forward pass of a microbatch through a stage.

        Args:
            key: names both until ``release``.
            state: parameters and buffers, which are there anyway.
        """
        before = self._packer, self._state
        self._packer, self._state = self.packer(key), storages_of(state)
        try:
            with saving(self._packer, self._state):
                yield
        finally:
            self._packer, self._state = before

    def packer(self, key: Any) -> Packer:
        """Return the packer of a microbatch and stage."""
        packer: Packer = self._keep_on_device
        if self._overlap is not None:
            packer = self._saves.setdefault(key, MicrobatchSaves(self._overlap)).pack
        for host in self._hosts:
            packer = host.packer(packer)
        return packer

    def run_segment(
        self,
        segment: SegmentRun,
        compute: Callable[..., tuple[Any, ...]],
        values: tuple[Any, ...],
        recompute_context: RecomputeContext,
    ) -> tuple[Any, ...]:
        """Return what the forward pass of a segment gives, within ``watching``.

        Args:
            compute: the pass.
            values: what enters it.
        """
        if not segment.recompute or not torch.is_grad_enabled():
            return compute(*values)
        parameters = (p for module in segment.modules for p in module._parameters.values() if p is not None)
        return self.checkpoint(compute, values, parameters, recompute_context(segment)).forward(values)

    def checkpoint(
        self,
        compute: Callable[..., tuple[Any, ...]],
        values: Sequence[Any],
        parameters: Iterable[Tensor],
        context: contextlib.AbstractContextManager[Any],
        *,
        received: bool = False,
    ) -> CheckpointedSegment:
        """Return ``compute`` as a segment that is recomputed in ``context``, of ``values`` that enter it.

        Args:
            received: ``values`` came from other stages, and are no activations of this one.
        """
        packer = SavedTensor if received and not self.rule.moves else self._packer
        packed, context = put_away(list(values), packer, self._state), self._recomputing(context)
        return CheckpointedSegment(compute, packed, self._packer, self._state, parameters, context)

    @contextlib.contextmanager
    def _recomputing(self, context: contextlib.AbstractContextManager[Any]) -> Iterator[None]:
        """A part of a module is computed without the module being called."""
        with contextlib.ExitStack() as scopes:
            for scope in (*(host.running() for host in self._hosts), context):
                scopes.enter_context(scope)
            yield

    def flush(self, key: Any) -> None:
        """Send everything that ``key`` keeps to the host."""
        if self._overlap is not None and key in self._saves:
            self._overlap.flush(self._saves[key])

    def prefetch(self, key: Any) -> None:
        """Begin to bring back what the backward pass of ``key`` needs first."""
        if self._overlap is not None and key in self._saves:
            self._overlap.prefetch(self._saves[key])

    def release(self, key: Any) -> None:
        """End ``key``: its backward pass is over."""
        self._saves.pop(key, None)

    def reset(self) -> None:
        """Drop every microbatch in flight."""
        self._saves.clear()
