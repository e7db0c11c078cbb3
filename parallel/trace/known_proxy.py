"""Proxies for values while a model is traced: each says of itself what the value would say.

A ``KnownProxy`` is an instance of ``Tensor`` where the value is one, and has the attributes and length of the value.
Where Python decides by a size, it decides as the value would, and the graph notes the decision, as a node that refuses
tiles for which it does not hold.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_map_only

from parallel.trace.hints import Hint


class UnknownProxy(fx.Proxy):
    """A proxy for a value that is not known without data, taken for a tensor."""

    tracer: Any  # a ``GraphTracer``
    hint: Hint | None = None

    @property
    def __class__(self) -> type:  # what isinstance() goes by
        return Tensor if self.hint is None or self.hint.is_tensor else type(self.hint.value)

    @__class__.setter
    def __class__(self, kind: type) -> None:
        raise TypeError(f"a value that is traced stays one; got {kind}")

    @property
    def data(self) -> Any:
        """Return what stands for the value without its history."""
        return super().__getattr__("data")

    @data.setter
    def data(self, value: Any) -> None:
        raise fx.proxy.TraceError("it sets the data of a tensor, which a graph does not record")


class KnownProxy(UnknownProxy):
    """A proxy with a hint of the value that it stands for."""

    hint: Hint

    def __init__(self, node: fx.Node, tracer: Any, hint: Hint) -> None:
        super().__init__(node, tracer)
        self.hint = hint

    def __getattr__(self, name: str) -> Any:
        if self.hint.is_tensor and callable(getattr(Tensor, name, None)):
            return super().__getattr__(name)
        value = getattr(self.hint.value, name)  # an AttributeError as the value's own: hasattr() goes by it
        if callable(value) and not isinstance(value, Tensor):
            return super().__getattr__(name)
        return self.tracer.create_proxy("call_function", getattr, (self, name), {})

    def __bool__(self) -> bool:
        return bool(self.tracer.decided(self, bool))

    def __int__(self) -> int:
        return int(self.tracer.decided(self, int))

    __index__ = __int__

    def __float__(self) -> float:
        return float(self.tracer.decided(self, float))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return numpy.asarray(self.tracer.decided(self, type(self.hint.value)), dtype)

    def __round__(self, digits: int | None = None) -> Any:
        return self.tracer.create_proxy("call_function", round, (self, digits), {})

    def __len__(self) -> int:
        return self._length()

    def __iter__(self) -> Iterator[Any]:
        return (self[k] for k in range(self._length()))  # type: ignore[index]

    def __contains__(self, wanted: Any) -> bool:
        return any(value is wanted or bool(value == wanted) for value in self)

    def __setitem__(self, index: Any, value: Any) -> None:
        self.tracer.create_proxy("call_function", operator.setitem, (self, index, value), {})

    def _in_place(self, operation: Callable[..., Any], other: Any) -> Any:
        """Change the value as it would be: a view in its base, else by name, unless the tracer is ``in_place``."""
        value = self.hint.value
        self.tracer.by_side = True  # whether it is a view
        if isinstance(value, Tensor) and (value._is_view() or self.tracer.in_place):
            return self.tracer.create_proxy("call_function", operation, (self, other), {})
        return NotImplemented

    def _length(self) -> int:
        if isinstance(self.hint.value, Tensor):
            return int(self.shape[0])
        if isinstance(self.hint.value, torch.Size):
            return int(self.tracer.create_proxy("call_function", len, (self,), {}))
        return len(self.hint.value)  # a model gives the same number of values each time


for _name in ("iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "iand", "ior", "ixor", "imatmul"):
    setattr(KnownProxy, f"__{_name}__", functools.partialmethod(KnownProxy._in_place, getattr(operator, _name)))


class KnownNumber(KnownProxy):
    """A proxy for a size or another number, which cannot be iterated."""

    __iter__ = None  # type: ignore[assignment]


class OtherPathError(ValueError):
    """A traced model is given what would have made it decide otherwise."""


def as_traced(value: Any, expected: bool | int | float, where: str) -> None:
    """Refuse a run in which ``value`` would make the model decide otherwise than when it was traced, at ``where``.

    Raises:
        OtherPathError: it is not what was ``expected``.
    """
    if type(expected)(value) != expected:
        raise OtherPathError(
            f"the model decides by the shape, type or device of its tiles at {where}, and was split for tiles where "
            f"that is {expected!r}; got {value!r}: put what decides there into a submodule of its own, which stays "
            "whole and may decide anew each time. If it decides by shape, tiles of one size and batches that "
            "--microbatches divides also help"
        )


def detached(value: Any) -> Any:
    """Return ``value`` as ``torch.no_grad`` leaves it: nothing flows back through its tensors."""
    return tree_map_only(Tensor, Tensor.detach, value)


@functools.cache
def applied(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """Return what applies ``function``, the same each time, so that graphs with it can be compared."""

    @functools.wraps(function.forward, updated=())
    def apply(*args: Any, **kwargs: Any) -> Any:
        return function.apply(*args, **kwargs)

    apply.__name__ = apply.__qualname__ = function.__name__
    return apply


@functools.cache
def constant(values: bytes, dtype: torch.dtype, shape: torch.Size) -> Callable[[], Tensor]:
    """Return what gives a tensor of these values, a new one each time; the same for the same values."""

    def give() -> Tensor:
        return torch.frombuffer(bytearray(values), dtype=dtype).view(shape)

    give.__name__ = give.__qualname__ = "constant"
    return give
