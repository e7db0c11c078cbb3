"""Versions of the weights of a stage that every microbatch updates: weight stashing of PipeDream (Harlap et al., 2018,
section 3.3).

The backward pass of a microbatch uses the weights of its forward pass, though other microbatches have updated the stage
since. An update of weights that a microbatch in flight uses makes new ``Parameter`` objects and changes those. Changing
the old ones is no option: autograd refuses a change in place, and after ``parameter.data = ...`` a convolution computes
its gradients with the new weights, without an error.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping

from torch import nn

Version = tuple[nn.Parameter, ...]


class WeightVersions:
    """The newest weights of a module, and the older ones that microbatches in flight use.

    Args:
        module: whose trained parameters have versions. Buffers and frozen parameters have none.
    """

    def __init__(self, module: nn.Module) -> None:
        numbers: dict[nn.Parameter, int] = {}
        # A parameter may be held by several modules.
        self._places = [
            (owner, name, numbers.setdefault(parameter, len(numbers)))
            for owner in module.modules()
            for name, parameter in owner._parameters.items()
            if parameter is not None and parameter.requires_grad
        ]
        self._newest: Version = tuple(numbers)
        self._used: dict[int, Version] = {}

    def begin(self, i: int) -> None:
        """Let microbatch ``i``, whose forward pass follows, use the newest weights."""
        _drop_gradients(self._newest)
        self._used[i] = self._newest

    @contextlib.contextmanager
    def of(self, i: int) -> Iterator[None]:
        """Return a context in which the module has the weights that microbatch ``i`` uses, without gradients."""
        used, newest = self._used[i], self._newest
        _drop_gradients((*newest, *used))
        if used is newest:
            yield
            return
        self._put(used)
        try:
            yield
        finally:
            self._put(newest)

    def update(self, i: int, step: Callable[[Mapping[nn.Parameter, nn.Parameter]], None]) -> None:
        """Apply the gradients of microbatch ``i`` to the newest weights.

        Args:
            step: updates parameters by their gradients; is given those that take the place of others.
        """
        gradients = [parameter.grad for parameter in self._used[i]]
        _drop_gradients(self._used.pop(i))
        in_use = any(version is self._newest for version in self._used.values())
        new = self._renew() if in_use else {}
        for parameter, gradient in zip(self._newest, gradients, strict=True):
            parameter.grad = gradient
        step(new)

    def _renew(self) -> dict[nn.Parameter, nn.Parameter]:
        """Make copies the newest weights; return them by those that they are copies of."""
        new = {old: nn.Parameter(old.detach().clone()) for old in self._newest}
        self._newest = tuple(new.values())
        self._put(self._newest)
        return new

    def clear(self) -> None:
        """Forget the microbatches in flight."""
        self._used.clear()

    def _put(self, version: Version) -> None:
        for owner, name, number in self._places:
            setattr(owner, name, version[number])  # recurrent layers note it


def _drop_gradients(version: Version) -> None:
    for parameter in version:
        parameter.grad = None
