"""Running a model over ranks. Nothing else of MegaTile is imported here."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

Owner = TypeVar("Owner")
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def remembered(
    method: Callable[Concatenate[Owner, Arguments], Result],
) -> Callable[Concatenate[Owner, Arguments], Result]:
    """Let a method keep in its object what it returned for each choice of (hashable) arguments."""

    @functools.wraps(method)
    def call(self: Owner, /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        known: dict[Any, Result] = vars(self).setdefault(f"remembered {method.__name__}", {})
        key = args, *kwargs.items()
        if key not in known:
            known[key] = method(self, *args, **kwargs)
        return known[key]

    return call
