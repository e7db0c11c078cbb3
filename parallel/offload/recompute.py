"""A segment of a stage that is recomputed in the backward pass, from what entered it.

The forward pass saves nothing: what autograd would keep becomes a ``RecomputeHandle``. When backward asks for the first
of them, the segment runs again, with the same random numbers and without running statistics. What autograd keeps then
is what the handles stand for, in the same order. After Chen et al. 2016, Training Deep Nets with Sublinear Memory Cost;
by saved-tensor hooks, so that any backward pass goes through it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from parallel.offload.packing import Packed, Packer, check_version, restore, saving

Form = tuple[torch.Size, torch.dtype]


class RecomputeHandle:
    """Stands for a tensor that is not kept."""

    def __init__(self, segment: CheckpointedSegment, number: int) -> None:
        self._segment, self._number = segment, number

    def unpack(self) -> Tensor:
        return self._segment.saved(self._number)

    def __del__(self) -> None:
        self._segment.drop(self._number)


class CheckpointedSegment:
    """One segment and one microbatch.

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
        """Return what the second pass keeps in place ``number``; it is run if it has not been."""
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
                "a part of the model keeps other tensors when it is computed again: "
                f"{_forms_text(saved)} after {_forms_text(self._expected)}. It does not compute the same twice: use "
                "--recompute none, or leave out of the model what depends on anything but its input"
            )
        self._kept = kept


def _never(_: None) -> Tensor:
    raise AssertionError("nobody goes back through the second pass")


def _forms_text(forms: Sequence[Form]) -> str:
    return f"{len(forms)} tensors" + "".join(f", {tuple(shape)} {dtype}" for shape, dtype in forms[:3])
