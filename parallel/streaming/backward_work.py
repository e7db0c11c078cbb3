"""Counts the bytes that a backward pass works with, on tensors without data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from parallel.trace.op_recorder import storage_of


def backward_work(value: Any, leaves: Sequence[Any], others: Sequence[Tensor]) -> tuple[int, bool]:
    """Run the backward pass; return (work space, the gradient is handed on).

    Args:
        leaves: of the maps.
        others: parameters, and values without rows.
    """
    outputs = [tensor for tensor in tensors_of(value) if tensor.requires_grad]
    used = [tensor for tensor in tensors_of(leaves) if tensor.requires_grad]
    if not outputs or not (used or others):
        return 0, False
    pulled = [torch.empty_like(output) for output in outputs]
    with _Living() as living:
        gradients = torch.autograd.grad(outputs, [*used, *others], pulled, allow_unused=True)
    given = {storage_of(tensor) for tensor in pulled}
    fresh = {storage_of(g): g.untyped_storage().nbytes() for g in gradients if g is not None}
    of_maps = [storage_of(g) for g in gradients[: len(used)] if g is not None]
    made = sum(size for storage, size in fresh.items() if storage not in given)
    return max(0, living.peak - made), bool(of_maps) and all(storage in given for storage in of_maps)


class _Living(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts bytes of the storages made in its block while they live; ``peak``: the most at a time."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        self._made: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {storage_of(tensor).cdata for tensor in tensors_of((args, kwargs))}
        value = func(*args, **(kwargs or {}))
        made = [storage_of(tensor) for tensor in tensors_of(value)]
        self._made.update({storage.cdata: storage for storage in made if storage.cdata not in given})
        total = 0
        for key, storage in list(self._made.items()):
            alive: torch.UntypedStorage | None = torch.UntypedStorage._new_with_weak_ptr(storage.cdata)
            if alive is None:
                del self._made[key]
            else:
                total += alive.nbytes()
        self.peak = max(self.peak, total)
        return value


def tensors_of(value: Any) -> list[Tensor]:
    """Return the tensors in ``value``, however deep."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
