"""Python objects that pass between processes: sent to rank 0 or from it, and read without running the sender's code.

What ``load`` gives is made of plain types, small ones of torch, and classes that this process has loaded itself to hold
tensors: named tuples and containers that are registered with torch's pytree. Helpers for tensors as they are sent.
"""

from __future__ import annotations

import collections
import io
import pickle
import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree

from parallel.comm.communicator import TAGS, Communicator

BUILTINS = (bool, bytearray, bytes, complex, dict, float, frozenset, int, list, range, set, slice, str, tuple)
CONTAINERS = (collections.OrderedDict, collections.defaultdict, collections.deque)
OF_TORCH = (torch.Size, torch.device, _pytree.TreeSpec, _pytree.LeafSpec)
PLAIN = frozenset({*BUILTINS, *CONTAINERS, *OF_TORCH, collections.namedtuple, _pytree.treespec_leaf})
"""Calling any of them runs no code of the caller's choice. ``namedtuple`` is how pytree marks a structure."""
NAMES = (torch.dtype, torch.layout, torch.memory_format)
"""Types of torch whose values are pickled by their names."""


def gather_objects(communicator: Communicator, value: Any) -> list[Any] | None:
    """Return the ``value`` of every rank, which ``torch.save`` takes, in order, on rank 0; None on the others."""
    if communicator.rank:
        data = _to_bytes(value)
        for tensor in (torch.tensor([data.numel()]), data):
            communicator.isend(tensor, 0, TAGS).wait()
        return None
    values = [value]
    for rank in range(1, communicator.world):
        length = torch.zeros(1, dtype=torch.int64)
        communicator.irecv(length, rank, TAGS).wait()
        data = torch.empty(int(length), dtype=torch.uint8)
        communicator.irecv(data, rank, TAGS).wait()
        values.append(_from_bytes(data))
    return values


def broadcast_object(communicator: Communicator, value: Any) -> Any:
    """Return the ``value`` of rank 0, as ``gather_objects`` takes it, on every rank; others may have any."""
    if communicator.world == 1:
        return value
    data = torch.empty(0, dtype=torch.uint8) if communicator.rank else _to_bytes(value)
    length = torch.tensor([data.numel()])
    communicator.broadcast(length)
    data = torch.empty(int(length), dtype=torch.uint8) if communicator.rank else data
    communicator.broadcast(data)
    return _from_bytes(data)


def in_memory_order(tensor: Tensor) -> Tensor:
    """Return the elements (n,) of a dense tensor in the order of its memory, whatever the order of its dims."""
    return tensor.as_strided((tensor.numel(),), (1,))


def make_dense(tensors: Iterable[Tensor]) -> None:
    """Copy to dense memory those of ``tensors`` that have gaps or overlap in theirs, as parts of larger tensors do."""
    for tensor in tensors:
        # ``empty_like`` keeps the strides of a dense tensor alone.
        if tensor.layout is torch.strided and torch.empty_like(tensor, device="meta").stride() != tensor.stride():
            tensor.data = tensor.detach().clone()


def pinned_like(tensor: Tensor) -> Tensor:
    """Return page-locked host memory of the size of ``tensor``."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)


def _to_bytes(value: Any) -> Tensor:
    stream = io.BytesIO()
    torch.save(value, stream)
    return torch.frombuffer(stream.getbuffer(), dtype=torch.uint8)  # as large as the model: not copied once more


def _from_bytes(data: Tensor) -> Any:
    return torch.load(io.BytesIO(data.numpy().data), map_location="cpu", weights_only=True)


class UnknownTypeError(ValueError):
    """A value holds, or bytes ask for, something that is not plain data."""


def dump(value: Any, *known: type) -> bytes:
    """Return ``value`` as bytes that ``load`` takes, with the same ``known`` classes.

    Raises:
        UnknownTypeError: it holds an object of another class.
    """
    try:
        data = pickle.dumps(value)
    except (pickle.PicklingError, AttributeError, TypeError) as fault:
        raise UnknownTypeError(str(fault)) from fault
    load(data, *known)
    return data


def load(data: bytes, *known: type) -> Any:
    """Return what ``dump`` was given.

    Args:
        known: further classes that may be made, plain data all of them.

    Raises:
        UnknownTypeError: the bytes ask for anything else to be made or called.
    """
    return _Unpickler(io.BytesIO(data), known).load()


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, known: tuple[type, ...]) -> None:
        super().__init__(file)
        self._known = PLAIN | set(known)

    def find_class(self, module: str, name: str) -> Any:
        value: Any = sys.modules.get(module)  # nothing is imported: that, too, runs code
        for part in name.split("."):
            value = getattr(value, part, None)
        is_known = type(value).__hash__ is not None and value in self._known
        is_container = isinstance(value, type) and issubclass(value, (tuple, *CONTAINERS, dict, list))
        holds_tensors = is_container and (value in _pytree.SUPPORTED_NODES or _pytree.is_namedtuple_class(value))
        if isinstance(value, NAMES) or is_known or holds_tensors:
            return value
        raise UnknownTypeError(f"{module}.{name} is not plain data")
