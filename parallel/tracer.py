"""The fx tracer behind ``trace``: what it looks into, how values are called, and what it refuses to record.

A graph has no place for gradient switches, autocast regions, hooks or numbers drawn while tracing; a module that has
any of these fails to trace, is named in ``failed``, and is kept whole in the next attempt.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn
from torch.nn.modules.batchnorm import _NormBase

SCOPE = "scope"
"""Key in a node's ``meta``: path of the module whose forward the node is from."""

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def scope_of(node: fx.Node) -> str:
    """Path of the module whose forward ``node`` is from, "" for the model itself."""
    return str(node.meta.get(SCOPE, ""))


class GraphTracer(fx.Tracer):
    """Traces one module once.

    Args:
        opaque: paths of the modules that stay whole.
    """

    # A buffer is looked up when the graph runs, not when it is made.
    proxy_buffer_attributes = True

    def __init__(self, opaque: set[str]) -> None:
        super().__init__()
        self.opaque = opaque
        self.failed: str | None = None
        """Path of the innermost module that could not be traced; None while it is the model itself."""
        self._paths: list[str] = []

    def trace(self, root: Any, concrete_args: dict[str, Any] | None = None) -> fx.Graph:
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            self._switches = _switches()
            drawn = _drawn()
            graph = super().trace(root, concrete_args)
            if _drawn() != drawn:
                raise fx.proxy.TraceError("it draws random numbers that do not depend on its input")
        return graph

    def create_args_for_root(self, root_fn: Any, is_module: bool, concrete_args: Any = None) -> tuple[Any, list[Any]]:
        """The model and one tensor; other arguments keep their defaults."""
        if any(getattr(self.root, hooks) for hooks in HOOKS):
            raise fx.proxy.TraceError("hooks of the model itself would run in no stage; put them on its submodules")
        names = [
            p.name for p in inspect.signature(inspect.unwrap(root_fn)).parameters.values() if p.kind != p.VAR_POSITIONAL
        ]
        return root_fn, [self.root, self.create_proxy("placeholder", names[1] if len(names) > 1 else "x", (), {})]

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return (
            super().is_leaf_module(m, module_qualified_name)
            or module_qualified_name in self.opaque
            # Also others' kinds of batch norm: running statistics are kept right layer by layer.
            or isinstance(m, (_NormBase, torch.jit.ScriptModule))
            or any(getattr(m, hooks) for hooks in HOOKS)
        )

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        path = self.path_of_module(m)
        if self.is_leaf_module(m, path):
            return super().call_module(m, forward, args, kwargs)
        self._paths.append(path)
        drawn = _drawn()
        try:
            value = super().call_module(m, forward, args, kwargs)
            if _drawn() != drawn:
                raise fx.proxy.TraceError(f"{path} draws random numbers that do not depend on its input")
        except Exception:
            self.failed = self.failed or path
            raise
        self._paths.pop()
        return value

    def create_node(
        self,
        kind: str,
        target: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        name: str | None = None,
        type_expr: Any = None,
    ) -> fx.Node:
        if _switches() != self._switches:
            raise fx.proxy.TraceError("it switches gradients or autocast, which a graph does not record")
        scope = self._paths[-1] if self._paths else ""
        if scope and name is None and kind in ("call_function", "call_method"):
            called = target if isinstance(target, str) else getattr(target, "__name__", "function")
            name = f"{scope.replace('.', '_')}_{called.strip('_')}"
        node = super().create_node(kind, target, args, kwargs, name, type_expr)
        node.meta[SCOPE] = scope
        return node


def _switches() -> tuple[bool, ...]:
    devices = ("cpu", "cuda")
    return (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), *map(torch.is_autocast_enabled, devices))


def _drawn() -> tuple[Any, ...]:
    return random.getstate(), torch.random.get_rng_state().numpy().tobytes()
