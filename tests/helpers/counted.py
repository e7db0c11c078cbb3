"""Elements that NumPy visits while a function works on an array: the cost of an algorithm, whatever the machine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray


class _Counted(np.ndarray):
    """Array that adds up the sizes of the arrays it is used with; results of the same kind, to any depth."""

    visits = 0

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **keywords: Any) -> Any:
        _count(*inputs)
        keywords |= {"out": _plain(keywords["out"])} if keywords.get("out") is not None else {}
        return _counted(getattr(ufunc, method)(*_plain(inputs), **keywords))

    def __array_function__(self, function: Any, types: Any, inputs: Any, keywords: Any) -> Any:
        _count(*inputs, *keywords.values())
        return _counted(function(*_plain(inputs), **_plain(keywords)))

    def __getitem__(self, key: Any) -> Any:
        item = self.view(np.ndarray)[_plain(key)]
        _count(item if isinstance(item, np.ndarray) else np.empty(1))
        return _counted(item)


def _count(*values: Any) -> None:
    for value in values:
        if isinstance(value, np.ndarray):
            _Counted.visits += value.size
        elif isinstance(value, list | tuple):
            _count(*value)


def _plain(value: Any) -> Any:
    if isinstance(value, _Counted):
        return value.view(np.ndarray)
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    return type(value)(map(_plain, value)) if isinstance(value, list | tuple) else value


def _counted(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.view(_Counted)
    return type(value)(map(_counted, value)) if type(value) in (list, tuple) else value


def visited(work: Callable[..., object], *arrays: NDArray[Any]) -> int:
    """Return how many elements ``work`` visits when it is called with ``arrays``."""
    _Counted.visits = 0
    work(*(array.view(_Counted) for array in arrays))
    return _Counted.visits
