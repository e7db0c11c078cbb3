"""What was traced of one model, for another that is the same: ranks that are threads of one process trace once.

Takes a ``Traced`` and a model; gives a ``Traced`` of that model, or None where the two might be traced differently.
Looking whether two models are the same takes a hundredth of the time that tracing takes, and copying a graph a tenth.
"""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Iterator
from dataclasses import replace
from enum import Enum
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from parallel.trace.trace import Traced

_PLAIN = (bool, int, float, str, bytes, type(None), torch.dtype, torch.device, torch.Size, type)
_SHARED = (FunctionType, BuiltinFunctionType, Enum)


def taken_over(traced: Traced, module: nn.Module) -> Traced | None:
    """Return what tracing ``module`` would give, by copies of the graphs of ``traced``; None where that is not sure.

    Two models are the same if all that is set on their modules is, but for the values of parameters and buffers, by
    which no path that is traced decides.
    """
    if not is_same(traced.model, module):
        return None
    pairs = itertools.chain(
        zip(traced.model.modules(), module.modules(), strict=True),
        zip(_named(traced.model), _named(module), strict=True),
    )
    memo: dict[int, Any] = {id(theirs): ours for theirs, ours in pairs}
    training = copy.deepcopy(traced.training, memo)
    evaluation = training if traced.evaluation is traced.training else copy.deepcopy(traced.evaluation, memo)
    return replace(traced, training=training, evaluation=evaluation, model=module)


def is_same(model: nn.Module, other: nn.Module) -> bool:
    """Return whether all is known to be the same that is set on the modules of two models, values of parameters and
    buffers aside."""
    ours, theirs = list(model.modules()), list(other.modules())
    if len(ours) != len(theirs):
        return False
    numbers = {id(module): number for number, module in enumerate(ours)}
    numbers |= {id(module): number for number, module in enumerate(theirs)}
    alike = all(_alike(mine, its, numbers) for mine, its in zip(ours, theirs, strict=True))
    return alike and _tied(model) == _tied(other)


def _alike(ours: nn.Module, theirs: nn.Module, numbers: dict[int, int]) -> bool:
    mine, its = vars(ours), vars(theirs)
    if type(ours) is not type(theirs) or mine.keys() != its.keys():
        return False
    return all(_equal(value, its[name], numbers) for name, value in mine.items())


def _equal(value: Any, other: Any, numbers: dict[int, int]) -> bool:
    """Return whether two values set on modules are known to be the same: of other kinds than these nobody knows."""
    if type(value) is not type(other):
        return False
    if isinstance(value, _PLAIN):
        return bool(value == other)
    if isinstance(value, _SHARED):
        return value is other
    if isinstance(value, nn.Module):
        return id(value) in numbers and numbers[id(value)] == numbers.get(id(other))
    if isinstance(value, Tensor):
        return not nn.parameter.is_lazy(value) and _form(value) == _form(other)
    if isinstance(value, functools.partial):
        mine, its = ((each.func, each.args, each.keywords) for each in (value, other))
        return _equal(mine, its, numbers)
    if isinstance(value, (list, tuple)):
        pairs = zip(value, other, strict=False)
        return len(value) == len(other) and all(_equal(mine, its, numbers) for mine, its in pairs)
    if isinstance(value, dict):
        return list(value) == list(other) and all(_equal(mine, other[key], numbers) for key, mine in value.items())
    return isinstance(value, (set, frozenset)) and all(isinstance(one, _PLAIN) for one in value) and value == other


def _form(tensor: Tensor) -> tuple[Any, ...]:
    return (tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad)


def _tied(model: nn.Module) -> list[int]:
    """Return for every name of a parameter or buffer the number of the first that is the same tensor."""
    first: dict[int, int] = {}
    return [first.setdefault(id(tensor), number) for number, tensor in enumerate(_named(model))]


def _named(model: nn.Module) -> Iterator[Tensor]:
    yield from (tensor for _, tensor in model.named_parameters(remove_duplicate=False))
    yield from (tensor for _, tensor in model.named_buffers(remove_duplicate=False))
