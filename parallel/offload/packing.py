"""Saved-tensor hooks: what autograd keeps in place of a tensor, how the tensor comes back, and a meter of bytes."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Container, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_map


class Packed(Protocol):
    """A saved tensor, until this object is deleted."""

    def unpack(self) -> Tensor:
        """Return the tensor on the device, with the values it was packed with; may be called more than once."""


Packer = Callable[[Tensor], Packed]
"""Packs a tensor that is kept for backward."""


class SavedTensor:
    """A saved tensor that stays where it is; ``meter``, if any, counts it until this object is deleted."""

    def __init__(self, tensor: Tensor, meter: ActivationMeter | None = None) -> None:
        # An operation's own output comes with its grad_fn, which would keep itself alive through this object.
        self._tensor = tensor.detach()
        self._version = tensor._version
        self._meter = meter
        if meter is not None:
            storage = tensor.untyped_storage()
            self._counted = storage.data_ptr(), storage.nbytes()
            meter.add(*self._counted)

    def unpack(self) -> Tensor:
        """Return the tensor; a RuntimeError where it was changed in place, as autograd does not look within hooks."""
        check_version(self._tensor, self._version)
        return self._tensor

    def __del__(self) -> None:
        if hasattr(self, "_counted") and self._meter is not None:
            self._meter.remove(*self._counted)


def saving(packer: Packer, state: Container[int]) -> AbstractContextManager[Any]:
    """Return a context in which autograd keeps what ``packer`` makes of tensors, but those in storages ``state``."""

    def pack(tensor: Tensor) -> Packed:
        return SavedTensor(tensor) if tensor.untyped_storage().data_ptr() in state else packer(tensor)

    return saved_tensors_hooks(pack, lambda packed: packed.unpack())


class ActivationMeter:
    """Counts the bytes that autograd keeps for backward, for one rank.

    Forward passes run under ``watching()``; each storage that autograd saves counts once until all that was saved from
    it is deleted.

    Attributes:
        bytes, peak_bytes: kept now, and the most that was kept at a time.
    """

    def __init__(self) -> None:
        self.bytes = 0
        self.peak_bytes = 0
        self._holders: dict[int, int] = {}
        # Reentrant: a handle may be collected, and so counted off, while this thread is counting.
        self._lock = threading.RLock()

    def watching(self, state: Iterable[Tensor] = ()) -> AbstractContextManager[Any]:
        """Return a context that counts what forward passes in it, on this thread, keep for backward.

        Args:
            state: parameters and buffers, which do not count.
        """
        return saving(functools.partial(SavedTensor, meter=self), storages_of(state))

    def add(self, place: int, size: int) -> None:
        """Count a saved tensor in the storage of ``size`` bytes at ``place``."""
        with self._lock:
            holders = self._holders.get(place, 0)
            self._holders[place] = holders + 1
            if not holders:
                self.bytes += size
                self.peak_bytes = max(self.peak_bytes, self.bytes)

    def remove(self, place: int, size: int) -> None:
        """Count off what ``add`` counted."""
        with self._lock:
            self._holders[place] -= 1
            if not self._holders[place]:
                del self._holders[place]
                self.bytes -= size


@dataclass(frozen=True)
class _PackedLeaf:
    packed: Packed
    needs_grad: bool


def put_away(value: Any, packer: Packer, state: Container[int] = ()) -> Any:
    """Return ``value``, tensors in tuples, lists and dicts, with its tensors packed but those in storages ``state``."""

    def put(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or leaf.untyped_storage().data_ptr() in state:
            return leaf
        return _PackedLeaf(packer(leaf), leaf.requires_grad)

    return tree_map(put, value)


def restore(value: Any) -> Any:
    """Return what ``put_away`` was given; its tensors are leaves."""

    def back(leaf: Any) -> Any:
        return leaf.packed.unpack().detach().requires_grad_(leaf.needs_grad) if isinstance(leaf, _PackedLeaf) else leaf

    return tree_map(back, value, is_leaf=lambda leaf: isinstance(leaf, _PackedLeaf))


def check_version(tensor: Tensor, version: int) -> None:
    """Raise the RuntimeError of autograd if ``tensor`` was changed in place since it was at ``version``."""
    if tensor._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"{tuple(tensor.shape)} {tensor.dtype} is at version {tensor._version}, expected version {version}; "
            "write it without in-place, as x = x - mean for x -= mean"
        )


def storages_of(tensors: Iterable[Tensor]) -> set[int]:
    """Return the addresses of the storages of ``tensors``."""
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


Form = tuple[torch.dtype, torch.Size, tuple[int, ...], int | torch.SymInt, bool, bool]
"""Of a tensor: dtype, shape, strides, offset in elements, whether it is a conjugate or negative view."""


def bytes_view(tensor: Tensor) -> Tensor:
    """Return the whole storage of ``tensor``: uint8 (bytes,)."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def view_like(flat: Tensor, form: Form) -> Tensor:
    """Return a tensor in the storage of ``flat``."""
    dtype, shape, strides, offset, conjugate, negative = form
    view = torch.empty(0, dtype=dtype, device=flat.device).set_(flat.untyped_storage(), offset, shape, strides)
    view = view.conj() if conjugate else view
    return torch._neg_view(view) if negative else view


def form_of(tensor: Tensor) -> Form:
    """Return what ``view_like`` needs."""
    place = tensor.shape, tensor.stride(), tensor.storage_offset()
    return tensor.dtype, *place, tensor.is_conj(), tensor.is_neg()
