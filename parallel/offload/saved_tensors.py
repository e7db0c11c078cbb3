"""Applies a rank's activation policy to what its forward passes save: offload, recomputation, or neither.

A stage runs its forward passes under ``watching`` and its segments through ``run_segment``. Nothing here knows
schedules: others say when a microbatch is flushed or fetched.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from parallel.memory.policy import ActivationPolicy
from parallel.offload.copies import Copies
from parallel.offload.host_memory import HostMemory
from parallel.offload.host_parameters import HostParameters
from parallel.offload.overlap import MicrobatchSaves, OverlapOffload
from parallel.offload.packing import (
    ActivationMeter,
    Packed,
    Packer,
    SavedTensor,
    check_version,
    put_away,
    restore,
    saving,
    storages_of,
)
from parallel.trace.stage_module import SegmentRun

RecomputeContext = Callable[[SegmentRun], contextlib.AbstractContextManager[Any]]
"""Called before a segment is computed: gives what it is recomputed in, once."""
Form = tuple[torch.Size, torch.dtype]


class SavedTensors:
    """Saved tensors of all stages of a rank, as its policy says.

    Args:
        rule: what is to be done.

    Attributes:
        meter: counts the bytes of activations on the device.
        pool: host memory, with overlap.
    """

    def __init__(self, rule: ActivationPolicy, device: torch.device, *, meter: ActivationMeter | None = None) -> None:
        self.rule = rule
        self.pool: HostMemory | None = None
        self.copies = Copies.for_device(device)
        self.meter = meter
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
        return not (self.rule.moves or recomputes or self.meter is not None or self._hosts)

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
        """Return what the forward pass ``compute`` of a segment gives for ``values``, within ``watching``."""
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


class RecomputeHandle:
    """Stands for a tensor that is not kept."""

    def __init__(self, segment: CheckpointedSegment, number: int) -> None:
        self._segment, self._number = segment, number

    def unpack(self) -> Tensor:
        return self._segment.saved(self._number)

    def __del__(self) -> None:
        self._segment.drop(self._number)


class CheckpointedSegment:
    """A segment of a stage that is recomputed in the backward pass of one microbatch, from what entered it.

    The forward pass saves nothing: what autograd would keep becomes a ``RecomputeHandle``. When backward asks for the
    first of them, the segment runs again, with the same random numbers and without running statistics. What autograd
    keeps then is what the handles stand for, in the same order. After Chen et al. 2016, Training Deep Nets with
    Sublinear Memory Cost; by saved-tensor hooks, so that any backward pass goes through it.

    Args:
        compute: the segment's forward pass.
        values: what enters it, as ``put_away`` gives it.
        packer: packs what the second pass keeps.
        state: storages of parameters and buffers, which are there anyway.
        parameters: that the segment computes with.
        recompute_context: of the second pass: precision, random numbers, running statistics that stay as they are.
    """

    def __init__(
        self,
        compute: Callable[..., tuple[Any, ...]],
        values: Any,
        packer: Packer,
        state: Container[int],
        parameters: Iterable[Tensor],
        recompute_context: contextlib.AbstractContextManager[Any],
    ) -> None:
        self._compute, self._packer, self._state, self._context = compute, packer, state, recompute_context
        self._versions = [(parameter, parameter._version) for parameter in parameters]
        self._values = values
        self._expected: list[Form] = []
        self._kept: list[Packed | None] | None = None

    def forward(self, values: Sequence[Any]) -> tuple[Any, ...]:
        """Return what the forward pass gives, of ``values`` before they were put away."""
        with saving(self._handle, self._state):
            return self._compute(*values)

    def _handle(self, tensor: Tensor) -> Packed:
        self._expected.append((tensor.shape, tensor.dtype))
        return RecomputeHandle(self, len(self._expected) - 1)

    def saved(self, number: int) -> Tensor:
        """Return what the second pass keeps in place ``number``."""
        if self._kept is None:
            self.recompute()
        assert self._kept is not None
        packed = self._kept[number]
        assert packed is not None
        return packed.unpack()

    def drop(self, number: int) -> None:
        """Free what the second pass keeps in place ``number``."""
        if self._kept is not None:
            self._kept[number] = None

    def recompute(self) -> None:
        """Run the second pass now.

        Raises:
            RuntimeError: a parameter has been changed since the first pass, or the two passes differ.
        """
        for parameter, version in self._versions:
            check_version(parameter, version)
        kept: list[Packed | None] = []
        saved: list[Form] = []

        def pack(tensor: Tensor) -> None:
            if tensor.untyped_storage().data_ptr() not in self._state:
                saved.append((tensor.shape, tensor.dtype))
                kept.append(self._packer(tensor))

        values = iter(restore(self._values))  # which lets go of them
        self._values = None
        with self._context, torch.enable_grad(), saved_tensors_hooks(pack, _never):
            self._compute(*values)
        if saved != self._expected:
            raise RuntimeError(
                "a part of the model keeps other tensors when it is recomputed: "
                f"{_forms_text(saved)} after {_forms_text(self._expected)}. It does not compute the same twice: use "
                "--recompute none, or leave out of the model what depends on anything but its input"
            )
        self._kept = kept


def _never(_: None) -> Tensor:
    raise AssertionError("nobody goes back through the second pass")


def _forms_text(forms: Sequence[Form]) -> str:
    return f"{len(forms)} tensors" + "".join(f", {tuple(shape)} {dtype}" for shape, dtype in forms[:3])
