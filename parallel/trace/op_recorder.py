"""Record what torch computes, on fake tensors or real ones: operations, and what they change, draw and save."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, in_kernel_invocation_manager
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from parallel.graph.layers import Convolution, Op

_aten = torch.ops.aten
ALLOCATIONS = (
    _aten.empty.memory_format,
    _aten.new_empty.default,
    _aten.empty_like.default,
    _aten.empty_strided.default,
)
"""They give memory and touch none."""
NORMS = (_aten.native_batch_norm.default, _aten.cudnn_batch_norm.default)
"""Taken apart without data, they would take half of a run."""
SAME_FLOPS = {_aten._scaled_dot_product_flash_attention_for_cpu: _aten._scaled_dot_product_flash_attention}
"""An operation of which torch has no formula -> one of as many flops."""


@dataclass(frozen=True, slots=True)
class _Signature:
    """Facts of an operation from its schema.

    Attributes:
        dropout_p: by default; 1 of an operation that does not take it.
        composite: made of others, whose flops are its own.
    """

    name: str
    arguments: tuple[str, ...]
    written: tuple[str, ...]
    uses_rng: bool
    dropout_p: float
    computes: bool
    composite: bool


@functools.lru_cache(maxsize=1024)
def _signature(func: Any) -> _Signature:
    schema = func._schema
    views = any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
    return _Signature(
        name=schema.name.rpartition("::")[2],
        arguments=tuple(argument.name for argument in schema.arguments),
        written=tuple(a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write),
        uses_rng=torch.Tag.nondeterministic_seeded in func.tags,
        dropout_p=next((a.default_value for a in schema.arguments if a.name == "dropout_p"), 1.0),
        computes=func.namespace != "prim" and not views and func not in ALLOCATIONS,
        composite=func.namespace != "prim" and func.overloadpacket not in flop_registry and func._can_decompose(),
    )


class OpRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A record of what one node computes.

    Args:
        state: storages of parameters and buffers, which are there anyway.

    Attributes:
        written: storages that were changed.
        saved: number -> bytes of each storage that autograd saves for the backward pass, but those of ``state``.
        ops: what was computed; flops by torch's own formulas.
        uses_rng: random numbers were drawn.
    """

    def __init__(self, state: set[StorageWeakRef]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._state = state
        self._numbers: dict[StorageWeakRef, int] = {}
        self.begin()

    def begin(self) -> None:
        """Forget what was recorded: another node is run next."""
        self.written: set[StorageWeakRef] = set()
        self.saved: dict[int, int] = {}
        self.ops: list[Op] = []
        self.uses_rng = False

    def pack(self, tensor: Tensor) -> Tensor:
        """Record what autograd saves, and return it as it is; a hook for ``saved_tensors_hooks``."""
        if storage := self.numbered(tensor):
            number, size = storage
            self.saved[number] = size
        return tensor

    def numbered(self, tensor: Tensor) -> tuple[int, int] | None:
        """Return (number, bytes) of the storage of ``tensor``; None for that of a parameter or buffer."""
        storage = storage_of(tensor)
        if storage in self._state:
            return None
        return self._numbers.setdefault(storage, len(self._numbers)), tensor.untyped_storage().nbytes()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _aten.detach.default and isinstance(args[0], FakeTensor) and args[0].constant is None:
            return _detached(args[0])
        signature = _signature(func)
        arguments = dict(zip(signature.arguments, args, strict=False)) | kwargs
        if draws(func, args, kwargs):
            self.uses_rng = True
        if signature.written:
            self.written |= {storage_of(tensor) for tensor in written_by(func, args, kwargs)}
        if func is _aten.native_batch_norm.default and _is_normed(*args):
            self.written |= {storage_of(tensor) for tensor in tensors_of(args[3:5])}
            value, flops = normed_without_data(func, args[0]), 0
        elif signature.composite:
            value, flops = self._decomposed(func, args, kwargs)
        else:
            value, flops = _counted(func, args, kwargs)
        if signature.computes:
            self.ops.append(self._op(func, signature.name, arguments, value, flops))
        return value

    def _decomposed(self, func: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, int]:
        """Return the value of a composite operation, and the flops of those it is made of, which are not recorded."""
        before = len(self.ops)
        with self:
            value = func.decompose(*args, **kwargs)
        flops = sum(op.flops for op in self.ops[before:])
        del self.ops[before:]
        return value, flops

    def _op(self, func: Any, name: str, arguments: dict[str, Any], value: Any, flops: int) -> Op:
        read, written = tensors_of([*arguments.values()]), tensors_of(value)
        return Op(
            name=name,
            flops=flops,
            read_bytes=sum(map(bytes_of, read)),
            written_bytes=sum(map(bytes_of, written)),
            differentiable=any(tensor.requires_grad for tensor in read),
            passes_on=any(tensor.requires_grad and storage_of(tensor) not in self._state for tensor in read),
            convolution=_convolution(arguments, value) if func is _aten.convolution.default else None,
        )


def _is_normed(images: Tensor, *others: Any) -> bool:
    """Return whether a batch norm is in training, without data, of float32 and of several values a channel."""
    fake = isinstance(images, FakeTensor) and images.dtype is torch.float32
    return fake and bool(others[4]) and images.numel() != images.shape[1]


def normed_without_data(func: Any, images: Any) -> tuple[Tensor, ...]:
    """Return what ``func``, one of ``NORMS``, gives for ``images``, which are fake, without values."""
    lengths = [images.shape[1]] * 2 + [0] * (func is _aten.cudnn_batch_norm.default)
    with in_kernel_invocation_manager(images.fake_mode):
        sums = [torch.empty(length, dtype=images.dtype, device="meta") for length in lengths]
        made = (torch.empty_like(images), *sums)
    return tuple(FakeTensor(images.fake_mode, each, images.fake_device) for each in made)


def _detached(tensor: FakeTensor) -> FakeTensor:
    """Return ``tensor`` detached, which autograd does with each value that it saves: as its mode does it, without the
    look-up in a cache, which takes ten times as long."""
    with in_kernel_invocation_manager(tensor.fake_mode):
        alias = _aten.detach.default(tensor)
    return FakeTensor(tensor.fake_mode, alias, tensor.fake_device)


def _counted(func: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, int]:
    """Return the value of an operation and its flops, 0 for one of which torch has no formula."""
    value = func(*args, **kwargs)
    formula = flop_registry.get(SAME_FLOPS.get(func.overloadpacket, func.overloadpacket))
    return value, 0 if formula is None else formula(*args, **kwargs, out_val=value)


def _convolution(arguments: dict[str, Any], value: Tensor) -> Convolution:
    images, weight = arguments["input"], arguments["weight"]
    return Convolution(
        batch=images.shape[0],
        channels_in=images.shape[1],
        channels_out=value.shape[1],
        kernel=tuple(weight.shape[2:]),
        stride=tuple(arguments["stride"]),
        dilation=tuple(arguments["dilation"]),
        groups=arguments["groups"],
        size_in=tuple(images.shape[2:]),
        size_out=tuple(value.shape[2:]),
        transposed=arguments["transposed"],
    )


def bytes_of(tensor: Tensor) -> int:
    """Return the bytes of the values of ``tensor``, wherever they lie."""
    return tensor.numel() * tensor.element_size()


def tensors_of(value: Any) -> list[Tensor]:
    """Return the tensors in ``value``, however deep."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def draws(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Return whether an operation draws random numbers. Attention that has nothing to drop does not; torch leaves out
    arguments that are as by default."""
    signature = _signature(func)
    if not signature.uses_rng:
        return False
    arguments = dict(zip(signature.arguments, args, strict=False)) | kwargs
    return bool(arguments.get("dropout_p", signature.dropout_p) > 0)


def written_by(func: Any, args: Any, kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the tensors among the arguments of an operation that it changes."""
    signature = _signature(func)
    arguments = dict(zip(signature.arguments, args, strict=False)) | kwargs
    return tensors_of([arguments.get(name) for name in signature.written])


def storage_of(tensor: Tensor) -> StorageWeakRef:
    """Return the storage of ``tensor``: where two share it, a change of one shows in the other."""
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
