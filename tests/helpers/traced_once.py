"""One trace per worker of each small net that the tests of a folder split over and over.

What is kept belongs to no test, but to a copy of the first one's model: graphs name modules by their paths, and are
those of other models of its form, too. That tracing leaves a model as it was is for ``tests/parallel/trace``.
"""

from __future__ import annotations

import copy
import dataclasses
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parallel.trace import trace
from parallel.trace.trace import Traced
from parallel.trace.without_data import state_of

_KEPT: list[tuple[Traced, object]] = []
_KEEPING = threading.Lock()
_SMALL = 100_000
"""Values in parameters: larger models are not what many tests share."""


def known_form(model: nn.Module) -> object:
    """Return all that is set on the modules of ``model`` but for values of tensors; a new object where nobody knows
    whether it is the same for another model."""
    numbers = {id(module): number for number, module in enumerate(model.modules())}

    def form(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.shape, value.stride(), value.dtype, value.device, value.requires_grad
        if isinstance(value, nn.Module):
            return numbers.get(id(value), object())
        if isinstance(value, dict):
            return type(value), [(key, form(element)) for key, element in value.items()]
        if isinstance(value, list | tuple):
            return type(value), [form(element) for element in value]
        plain = value is None or isinstance(value, int | float | str | type | torch.dtype)
        return (type(value), value) if plain or callable(value) or value == set() else object()

    first: dict[int, int] = {}
    tied = [first.setdefault(id(tensor), number) for number, tensor in enumerate(state_of(model).values())]
    return [(type(module), form(vars(module))) for module in model.modules()], tied


def of_a_copy(traced: Traced) -> Traced:
    """Return what was traced as that of a copy of its model."""
    memo: dict[int, Any] = {}
    model = copy.deepcopy(traced.model, memo)
    training, evaluation = copy.deepcopy((traced.training, traced.evaluation), memo)
    return dataclasses.replace(traced, training=training, evaluation=evaluation, model=model)


@pytest.fixture(autouse=True)
def traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    anew = trace.trace_as_it_runs

    def trace_once(module: nn.Module, shape: tuple[int, ...], dtype: torch.dtype) -> Traced:
        asked = known_form(module), shape, dtype
        with _KEEPING:
            for kept, form in _KEPT:
                if form == asked:
                    return dataclasses.replace(kept, model=module)
            traced = anew(module, shape, dtype)
            if sum(parameter.numel() for parameter in module.parameters()) <= _SMALL:
                _KEPT.append((of_a_copy(traced), asked))
            return traced

    monkeypatch.setattr(trace, "trace_as_it_runs", trace_once)
