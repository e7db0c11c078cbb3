"""Check whether a model draws random numbers, as dropout does: a CPU and a GPU draw others from the same seed.

Takes a model and the shape of a microbatch; returns an answer without memory or time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from parallel.trace.without_data import preserve_module_state, run_without_data


class _Draws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees what draws."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags and _drops(func, args, kwargs or {}):
            self.names.append(func.overloadpacket.__name__)
        call: Callable[..., Any] = func
        return call(*args, **(kwargs or {}))


def _drops(func: Any, args: Sequence[Any], given: Mapping[str, Any]) -> bool:
    """False for attention that could drop, and is called with nothing to drop."""
    names = [argument.name for argument in func._schema.arguments]
    called = {argument.name: argument.default_value for argument in func._schema.arguments}
    called |= dict(zip(names, args, strict=False)) | dict(given)
    return bool(called.get("dropout_p", 1.0))


def refuse_draws(model: nn.Module, shape: tuple[int, ...]) -> None:
    """Let no rank of a mixed run compute other numbers than the next one would.

    Args:
        shape: (n, c, h, w) of a microbatch.

    Raises:
        ValueError: a training pass of ``model`` draws, or cannot be looked into.
    """
    watch = _Draws()
    with preserve_module_state(model):
        model.train()
        try:
            run_without_data(model, shape, watch=watch)
        except Exception as fault:  # whatever torch raises, and what a model that looks at its data does
            raise ValueError(
                "--device mixed: the model could not be looked into for random numbers, which a CPU and a GPU draw "
                f"differently ({str(fault).splitlines()[0] if str(fault) else type(fault).__name__}): use devices of "
                "one kind"
            ) from fault
    if drawn := ", ".join(dict.fromkeys(watch.names)):
        raise ValueError(
            f"--device mixed: the model draws random numbers ({drawn}), and a CPU and a "
            "GPU draw others from one seed, so that the step would depend on who computes what: use a model without "
            "dropout, or devices of one kind"
        )
