"""What a rank does with what its forward passes keep, put together from its rule: offload, recomputation, or neither.

Takes an ``ActivationPolicy``; a stage, or an engine with the whole model, runs its forward passes under ``watching``
and its segments through ``through``. Nothing here knows schedules: others say when a microbatch is flushed or fetched.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from parallel.memory.policy import ActivationPolicy
from parallel.offload.activation_meter import ActivationMeter
from parallel.offload.copies import Copies
from parallel.offload.host_memory import HostMemory
from parallel.offload.host_parameters import HostParameters
from parallel.offload.overlap import Flight, OverlapOffload
from parallel.offload.packing import Holding, Packed, Packer, storages_of
from parallel.offload.recompute import Again, unpack


class SegmentLike(Protocol):
    """A segment of a stage, as far as it matters here."""

    @property
    def recompute(self) -> bool: ...


Around = Callable[[], contextlib.AbstractContextManager[Any]]
"""Called before a segment is computed: gives what it is computed again in, once."""


class SavedTensors:
    """What a rank's policy does to saved tensors, for all its stages.

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
        self._overlap: OverlapOffload | None = None
        self._plain: Packer = Holding(meter)
        if self.moves:
            self.pool = HostMemory(self.copies, rule.host_bytes)
            self._overlap = OverlapOffload(
                self.copies, self.pool, ahead=rule.ahead, smallest=rule.smallest, meter=meter
            )
        self._flights: dict[Any, Flight] = {}
        self._packer: Packer = self._plain
        self._hosts: list[HostParameters] = []

    def streams(self, host: HostParameters) -> None:
        """Forward passes use parameters of ``host``, of which nothing is kept on the device."""
        self._hosts.append(host)

    @property
    def moves(self) -> bool:
        """Activations go to the host."""
        return self.rule.offload != "none"

    @property
    def idle(self) -> bool:
        """Autograd keeps what it keeps, and nobody counts it."""
        hooked = self.moves or self.rule.segmented or self._meter is not None
        return not hooked and not self._hosts

    @contextlib.contextmanager
    def watching(self, key: Any, state: Iterable[Tensor]) -> Iterator[Packer]:
        """Around the forward pass of a microbatch through a stage.

        Args:
            key: names both until ``landed``.
            state: parameters and buffers, which are there anyway.
        """
        before, self._packer = self._packer, self.packer(key)
        # Nobody asks for them where autograd keeps what it keeps, and sharded parameters have none to ask for.
        packer, anyway = self._packer, set() if self.idle else storages_of(state)

        def pack(tensor: Tensor) -> Tensor | Packed:
            return tensor if tensor.untyped_storage().data_ptr() in anyway else packer.pack(tensor)

        try:
            with contextlib.nullcontext() if self.idle else saved_tensors_hooks(pack, unpack):
                yield packer
        finally:
            self._packer = before

    def packer(self, key: Any) -> Packer:
        """That of a microbatch and stage."""
        packer = self._plain
        if self._overlap is not None:
            packer = self._flights.setdefault(key, self._overlap.flight())
        for host in self._hosts:
            packer = host.packer(packer)
        return packer

    def through(
        self,
        segment: SegmentLike,
        compute: Callable[..., tuple[Any, ...]],
        values: tuple[Any, ...],
        state: Collection[Tensor],
        around: Around,
    ) -> tuple[Any, ...]:
        """A segment's forward pass within ``watching``.

        Args:
            compute: the pass.
            values: what enters it.
            state: parameters and buffers, which are there anyway.
            around: what it is computed again in.
        """
        if not segment.recompute or not torch.is_grad_enabled():
            return compute(*values)
        surroundings = around()
        return Again(compute, values, self._packer, state, lambda: self._again(surroundings)).first(values)

    @contextlib.contextmanager
    def _again(self, surroundings: contextlib.AbstractContextManager[Any]) -> Iterator[None]:
        """A part of a module is computed without the module being called."""
        with contextlib.ExitStack() as scopes:
            for host in self._hosts:
                scopes.enter_context(host.running())
            scopes.enter_context(surroundings)
            yield

    def flush(self, key: Any) -> None:
        """Everything that ``key`` keeps leaves the device."""
        if self._overlap is not None and key in self._flights:
            self._overlap.flush(self._flights[key])

    def prefetch(self, key: Any) -> None:
        """Begin to bring back what the backward pass of ``key`` needs first."""
        if self._overlap is not None and key in self._flights:
            self._overlap.prefetch(self._flights[key])

    def landed(self, key: Any) -> None:
        """The backward pass of ``key`` is over."""
        self._flights.pop(key, None)

    def forget(self) -> None:
        """Drop every microbatch in flight."""
        self._flights.clear()
