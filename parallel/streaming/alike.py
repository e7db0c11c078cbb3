"""Tells which steps of a region compute alike, so that one run without data speaks for all of them.

A step is told apart by all that its run can depend on: what it calls and with which settings, parameters by their
forms, arguments, and the maps that it takes. What holds other modules, or has settings that cannot be written down the
same way twice, is like nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from torch import Tensor, fx, nn

REGISTRIES = ("_parameters", "_buffers", "_modules")
"""Of a module: what it holds, beside its settings."""


def called(module: nn.Module | None, node: fx.Node, names: dict[str, int], resolve: Callable[[Any], Any]) -> Hashable:
    """Return what ``node`` calls and with what; equal for two that compute alike. None where that cannot be told.

    Args:
        module: that the node calls, where it calls one.
        names: position of each map that the node takes.
        resolve: value of any other node that it names.
    """

    def written(argument: fx.Node) -> str:
        return f"map {names[argument.name]}" if argument.name in names else f"value {form(resolve(argument))}"

    given = tuple(repr(fx.map_arg(arguments, lambda n: _Text(written(n)))) for arguments in (node.args, node.kwargs))
    if node.op != "call_module":
        return node.op, node.target, given
    if module is None or any(True for _ in module.children()):
        return None
    settings = repr(sorted((name, value) for name, value in vars(module).items() if name not in REGISTRIES))
    return type(module), settings, _held(module), given


def form(value: Any) -> Hashable:
    """Return all that a run without data can see of ``value``."""
    if isinstance(value, Tensor):
        return tuple(value.shape), value.stride(), value.dtype, value.requires_grad, isinstance(value, nn.Parameter)
    if isinstance(value, (tuple, list)):
        return tuple(map(form, value))
    return repr(value)


def _held(module: nn.Module) -> Hashable:
    """Forms of a module's own parameters and buffers, by name."""
    held = {**module._parameters, **module._buffers}
    return tuple((name, form(tensor)) for name, tensor in held.items())


class _Text(str):
    """Text in place of a node, written without quotes."""

    def __repr__(self) -> str:
        return str(self)
