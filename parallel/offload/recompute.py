"""A segment of a stage that is computed again in the backward pass, from what entered it.

The forward pass saves nothing: what autograd would keep becomes a ``Promise``. When backward asks for the first of
them, the segment runs again, with the same random numbers, counting nothing, and what autograd keeps then is what was
promised, in the same order. After Chen et al. 2016, Training Deep Nets with Sublinear Memory Cost; by saved-tensor
hooks, so that any backward pass, also of DistributedDataParallel, goes through it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from parallel.offload.packing import Packed, Packer, put_away, restore, storages_of

Surroundings = Callable[[], contextlib.AbstractContextManager[Any]]
"""What a segment is computed again in: precision, random numbers, running statistics that stay as they are."""


class Promise:
    """What autograd holds in place of a tensor that is not kept."""

    def __init__(self, run: Again, number: int) -> None:
        self._run, self._number = run, number

    def unpack(self) -> Tensor:
        return self._run.saved(self._number)

    def __del__(self) -> None:
        self._run.forget(self._number)


class Again:
    """One segment and one microbatch.

    Args:
        compute: the segment's forward pass.
        values: what enters it; tensors may be in tuples, lists, dicts.
        packer: puts away what enters, and what the second pass keeps.
        state: parameters and buffers, which nobody need keep.
        surroundings: of the second pass.
    """

    def __init__(
        self,
        compute: Callable[..., tuple[Any, ...]],
        values: Sequence[Any],
        packer: Packer,
        state: Collection[Tensor],
        surroundings: Surroundings,
    ) -> None:
        self._compute, self._packer, self._state, self._surroundings = compute, packer, state, surroundings
        self._values: Any = put_away(list(values), packer, storages_of(state))
        self._promised: list[tuple[torch.Size, torch.dtype]] = []
        self._kept: list[Packed | None] | None = None

    def first(self, values: Sequence[Any]) -> tuple[Any, ...]:
        """The forward pass; ``values`` as given before."""
        anyway = storages_of(self._state)

        def pack(tensor: Tensor) -> Tensor | Promise:
            if tensor.untyped_storage().data_ptr() in anyway:
                return tensor
            self._promised.append((tensor.shape, tensor.dtype))
            return Promise(self, len(self._promised) - 1)

        with saved_tensors_hooks(pack, unpack):
            return self._compute(*values)

    def saved(self, number: int) -> Tensor:
        """What the second pass keeps in place ``number``; it is run when it has not been."""
        if self._kept is None:
            self._second()
        assert self._kept is not None
        packed = self._kept[number]
        assert packed is not None
        return packed.unpack()

    def forget(self, number: int) -> None:
        """Nobody asks for ``number`` any more."""
        if self._kept is not None:
            self._kept[number] = None

    def _second(self) -> None:
        anyway = storages_of(self._state)
        kept: list[Packed | None] = []
        saved: list[tuple[torch.Size, torch.dtype]] = []

        def pack(tensor: Tensor) -> None:
            if tensor.untyped_storage().data_ptr() not in anyway:
                saved.append((tensor.shape, tensor.dtype))
                kept.append(self._packer.pack(tensor))

        values = restore(self._values)
        self._values = None
        with self._surroundings(), torch.enable_grad(), saved_tensors_hooks(pack, _never):
            self._compute(*values)
        if saved != self._promised:
            raise RuntimeError(
                "a part of the model keeps other tensors when it is computed again: "
                f"{_told(saved)} after {_told(self._promised)}. It does not compute the same twice: use --recompute "
                "none, or leave out of the model what depends on anything but its input"
            )
        self._kept = kept


def unpack(packed: Any) -> Tensor:
    """Whatever the hooks of this package made of a tensor."""
    if isinstance(packed, Tensor):
        return packed
    tensor: Tensor = packed.unpack()
    return tensor


def _never(_: None) -> Tensor:
    raise AssertionError("nobody goes back through the second pass")


def _told(tensors: Sequence[tuple[torch.Size, torch.dtype]]) -> str:
    return f"{len(tensors)} tensors" + "".join(f", {tuple(shape)} {dtype}" for shape, dtype in tensors[:3])
