"""Read what another process has pickled, without running code of its choice.

The value is made of plain types, small ones of torch, and classes that this process has loaded itself to hold tensors:
named tuples and containers that are registered with torch's pytree.
"""

from __future__ import annotations

import collections
import io
import pickle
import sys
from typing import Any

import torch
from torch.utils import _pytree

BUILTINS = (bool, bytearray, bytes, complex, dict, float, frozenset, int, list, range, set, slice, str, tuple)
CONTAINERS = (collections.OrderedDict, collections.defaultdict, collections.deque)
OF_TORCH = (torch.Size, torch.device, _pytree.TreeSpec, _pytree.LeafSpec)
PLAIN = frozenset({*BUILTINS, *CONTAINERS, *OF_TORCH, collections.namedtuple, _pytree.treespec_leaf})
"""Calling any of them runs no code of the caller's choice. ``namedtuple`` is how pytree marks a structure."""
NAMES = (torch.dtype, torch.layout, torch.memory_format)
"""Types of torch whose values are pickled by their names."""


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
