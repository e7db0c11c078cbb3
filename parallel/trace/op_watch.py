"""What torch computes while it is watched: operations with their flops and bytes, and what they change, draw and keep.

Takes no part in what is computed, on fake tensors or real ones; gives ``Op``s. Flops are those of torch's own formulas.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from parallel.graph.op import Convolution, Op

_aten = torch.ops.aten
ALLOCATIONS = (
    _aten.empty.memory_format,
    _aten.new_empty.default,
    _aten.empty_like.default,
    _aten.empty_strided.default,
)
"""They give memory and touch none."""


@dataclass(frozen=True, slots=True)
class _Signature:
    """What an operation's schema says of it.

    Attributes:
        arguments: their names in order.
        written: those of them that it changes.
        draws: it draws random numbers.
        computes: it makes or changes something; views and allocations do not.
        composite: it is made of others, whose flops are its own.
    """

    name: str
    arguments: tuple[str, ...]
    written: tuple[str, ...]
    draws: bool
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
        draws=torch.Tag.nondeterministic_seeded in func.tags,
        computes=func.namespace != "prim" and not views and func not in ALLOCATIONS,
        composite=func.namespace != "prim" and func.overloadpacket not in flop_registry and func._can_decompose(),
    )


class OpWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes what one node computes: storages written to, random numbers drawn, operations, and what autograd keeps.

    Args:
        state: memory of parameters and buffers, which is there anyway.
    """

    def __init__(self, state: set[StorageWeakRef]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._state = state
        self._numbers: dict[StorageWeakRef, int] = {}
        self.begin()

    def begin(self) -> None:
        """A new node."""
        self.written: set[StorageWeakRef] = set()
        self.saved: dict[int, int] = {}
        self.ops: list[Op] = []
        self.drew = False

    def pack(self, tensor: Tensor) -> Tensor:
        """Takes what autograd keeps, and keeps it as autograd does."""
        if piece := self.numbered(tensor):
            number, size = piece
            self.saved[number] = size
        return tensor

    def numbered(self, tensor: Tensor) -> tuple[int, int] | None:
        """(number, bytes) of the memory of ``tensor``; None where a parameter or buffer lies in it."""
        memory = memory_of(tensor)
        if memory in self._state:
            return None
        return self._numbers.setdefault(memory, len(self._numbers)), tensor.untyped_storage().nbytes()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        signature = _signature(func)
        given = dict(zip(signature.arguments, args, strict=False)) | kwargs
        if signature.draws and given.get("dropout_p", 1) > 0:
            self.drew = True
        if signature.written:
            self.written |= {memory_of(tensor) for tensor in _tensors(map(given.get, signature.written))}
        if func is _aten.native_batch_norm.default and (normed := _normed(*args)) is not None:
            self.written |= {memory_of(tensor) for tensor in _tensors(args[3:5])}
            value, flops = normed, 0
        elif signature.composite:
            value, flops = self._parts(func, args, kwargs)
        else:
            value, flops = _counted(func, args, kwargs)
        if signature.computes:
            self.ops.append(self._op(func, signature.name, given, value, flops))
        return value

    def _parts(self, func: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, int]:
        """What a composite operation gives, and the flops of its parts, which are not noted themselves."""
        before = len(self.ops)
        with self:
            value = func.decompose(*args, **kwargs)
        flops = sum(op.flops for op in self.ops[before:])
        del self.ops[before:]
        return value, flops

    def _op(self, func: Any, name: str, given: dict[str, Any], value: Any, flops: int) -> Op:
        read, written = _tensors(given.values()), _tensors((value,))
        return Op(
            name=name,
            flops=flops,
            read_bytes=sum(map(bytes_of, read)),
            written_bytes=sum(map(bytes_of, written)),
            differentiable=any(tensor.requires_grad for tensor in read),
            passes_on=any(tensor.requires_grad and memory_of(tensor) not in self._state for tensor in read),
            convolution=_convolution(given, value) if func is _aten.convolution.default else None,
        )


def _normed(images: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor] | None:
    """What batch norm gives in training without data, in single precision; taken apart it takes half of a run. None
    where it has to be, and where one value a channel has no variance."""
    if not isinstance(images, FakeTensor) or images.dtype is not torch.float32 or not others[4]:
        return None
    if images.numel() == images.shape[1]:
        return None
    mean, deviation = (images.new_empty(images.shape[1]) for _ in range(2))
    return torch.empty_like(images), mean, deviation


def _counted(func: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, int]:
    """What an operation gives, and its flops: 0 of one for which torch has no formula."""
    value = func(*args, **kwargs)
    formula = flop_registry.get(func.overloadpacket)
    return value, 0 if formula is None else formula(*args, **kwargs, out_val=value)


def _convolution(given: dict[str, Any], value: Tensor) -> Convolution:
    images, weight = given["input"], given["weight"]
    return Convolution(
        batch=images.shape[0],
        channels_in=images.shape[1],
        channels_out=value.shape[1],
        kernel=tuple(weight.shape[2:]),
        stride=tuple(given["stride"]),
        dilation=tuple(given["dilation"]),
        groups=given["groups"],
        size_in=tuple(images.shape[2:]),
        size_out=tuple(value.shape[2:]),
        transposed=given["transposed"],
    )


def bytes_of(tensor: Tensor) -> int:
    """Of its values, wherever they lie."""
    return tensor.numel() * tensor.element_size()


def _tensors(values: Iterable[Any]) -> list[Tensor]:
    """Among what an operation takes or gives: tensors, and those in lists."""
    found = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += [each for each in value if isinstance(each, Tensor)]
    return found


def memory_of(tensor: Tensor) -> StorageWeakRef:
    """What tensors share when a change of one shows in the other."""
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
