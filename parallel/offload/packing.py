"""What a saved-tensor hook makes of a tensor that autograd keeps, and how the tensor comes back.

A ``Packer`` packs on behalf of one microbatch of one stage. The plainest holds tensors where they are; others move them
to the host. Recomputation packs what it needs to begin again with the same packer.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from parallel.offload.activation_meter import ActivationMeter


class Packed(Protocol):
    """A tensor put away, for as long as this object lives."""

    def unpack(self) -> Tensor:
        """The tensor on the device, with the values it was packed with; may be called more than once."""
        ...


class Packer(Protocol):
    """Puts tensors away."""

    def pack(self, tensor: Tensor) -> Packed: ...


class Held:
    """A tensor that stays where it is."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor.detach()
        self._version = tensor._version

    def unpack(self) -> Tensor:
        """The tensor.

        Raises:
            RuntimeError: it was changed in place meanwhile. Autograd does not look where hooks are at work.
        """
        check_version(self._tensor, self._version)
        return self._tensor


class Holding:
    """Leaves tensors where they are.

    Args:
        meter: counts them.
    """

    def __init__(self, meter: ActivationMeter | None = None) -> None:
        self._meter = meter

    def pack(self, tensor: Tensor) -> Packed:
        return Held(tensor) if self._meter is None else self._meter.hold(tensor)


@dataclass(frozen=True)
class _Put:
    """A tensor put away, and whether it asks for a gradient."""

    packed: Packed
    needs_grad: bool


def put_away(value: Any, packer: Packer, anyway: Container[int] = ()) -> Any:
    """``value``, tensors in tuples, lists and dicts, with its tensors packed.

    Args:
        anyway: storages of what is there in any case; these are left.
    """

    def put(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or leaf.untyped_storage().data_ptr() in anyway:
            return leaf
        return _Put(packer.pack(leaf), leaf.requires_grad)

    return tree_map(put, value)


def restore(value: Any) -> Any:
    """What ``put_away`` was given; its tensors are leaves."""

    def back(leaf: Any) -> Any:
        return leaf.packed.unpack().detach().requires_grad_(leaf.needs_grad) if isinstance(leaf, _Put) else leaf

    return tree_map(back, value, is_leaf=lambda leaf: isinstance(leaf, _Put))


def check_version(tensor: Tensor, version: int) -> None:
    """Refuse a tensor that was changed in place since it was at ``version``.

    Raises:
        RuntimeError: as autograd's own.
    """
    if tensor._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"{tuple(tensor.shape)} {tensor.dtype} is at version {tensor._version}, expected version {version}"
        )


def storages_of(tensors: Iterable[Tensor]) -> set[int]:
    """Where the storages of ``tensors`` lie."""
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


def bytes_view(tensor: Tensor) -> Tensor:
    """The whole storage of ``tensor``: uint8 (bytes,)."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def view_like(flat: Tensor, form: tuple[torch.dtype, Any, Any, Any]) -> Tensor:
    """A tensor in the storage of ``flat``: dtype, shape, strides, offset in elements."""
    dtype, shape, strides, offset = form
    return torch.empty(0, dtype=dtype, device=flat.device).set_(flat.untyped_storage(), offset, shape, strides)


def form_of(tensor: Tensor) -> tuple[torch.dtype, Any, Any, Any]:
    """What ``view_like`` needs."""
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset()
