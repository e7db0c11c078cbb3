"""Buffers that forward passes update, in a stage at work: as the plain step has them, whatever is in flight.

Takes a module and the names that ``updated_search`` found. A pass that is computed again sees them as the first did and
leaves them as they are; what autograd keeps of them, and what is sent, is a copy: the next microbatch changes them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from parallel.offload.packing import Packed, Packer, storages_of


class UpdatedBuffers:
    """Those of one module.

    Args:
        names: of the buffers; those that ``module`` does not have are passed over.
    """

    def __init__(self, module: nn.Module, names: Collection[str] = ()) -> None:
        self._owners: list[tuple[dict[str, Any], str]] = []
        own = {name for name, _ in module.named_buffers(remove_duplicate=False)}
        own |= {name for name, _ in module.named_parameters(remove_duplicate=False)}
        for name in sorted(own.intersection(names)):
            owner, _, last = name.rpartition(".")
            part = module.get_submodule(owner)
            self._owners.append((vars(part)["_buffers" if last in part._buffers else "_parameters"], last))

    def __bool__(self) -> bool:
        return bool(self._owners)

    @property
    def tensors(self) -> list[Tensor]:
        """The buffers as they are now."""
        return [tensor for owner, name in self._owners if (tensor := owner[name]) is not None]

    def values(self) -> list[Tensor | None]:
        """Copies of the buffers, for ``as_of``."""
        buffers = (owner[name] for owner, name in self._owners)
        return [None if tensor is None else tensor.detach().clone() for tensor in buffers]

    @contextmanager
    def as_of(self, values: list[Tensor | None]) -> Iterator[None]:
        """Within the block the buffers have ``values``; after it they are as before, past autograd's version counters,
        because autograd keeps copies of them."""
        before = [owner[name] for owner, name in self._owners]
        now = self.values()
        self._set(before, values)
        try:
            yield
        finally:
            self._set(before, now)

    def _set(self, tensors: list[Tensor | None], values: list[Tensor | None]) -> None:
        for (owner, name), tensor, value in zip(self._owners, tensors, values, strict=True):
            if tensor is None or value is None or tensor.shape != value.shape:
                owner[name] = value
            else:
                tensor.data.copy_(value)
                owner[name] = tensor

    def apart(self, value: Any) -> Any:
        """``value`` with copies of the tensors that lie in the memory of these buffers."""
        if not self._owners:
            return value
        ours = storages_of(self.tensors)
        return tree_map(lambda leaf: _copied(leaf, ours) if isinstance(leaf, Tensor) else leaf, value)

    def packer(self, inner: Packer) -> Packer:
        """``inner``, given copies of what lies in the memory of these buffers."""
        return _Copying(inner, storages_of(self.tensors)) if self._owners else inner


class _Copying:
    def __init__(self, inner: Packer, storages: set[int]) -> None:
        self._inner, self._storages = inner, storages

    def pack(self, tensor: Tensor) -> Packed:
        return self._inner.pack(_copied(tensor, self._storages))


def _copied(tensor: Tensor, storages: set[int]) -> Tensor:
    return torch.clone(tensor) if tensor.untyped_storage().data_ptr() in storages else tensor
