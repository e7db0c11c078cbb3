"""The fx tracer behind ``trace``: what it looks into, how values are called, and what it refuses to record.

A graph has no place for autocast regions, hooks, assigned buffers, numbers drawn while tracing, or for decisions by
data or by the number of tiles; a module that has any of these fails to trace, is named in ``failed``, and is kept whole
in the next attempt. Decisions by the size of a tile are taken as for the traced size, and noted.
"""

from __future__ import annotations

import functools
import inspect
import random
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils import checkpoint

from parallel.trace.hints import Hints
from parallel.trace.known_proxy import (
    DecidingTracer,
    KnownNumber,
    KnownProxy,
    UnknownProxy,
    applied,
    as_traced,
    detached,
)
from parallel.trace.updated_search import CHECKPOINT

SCOPE = "scope"
"""Key in a node's ``meta``: path of the module whose forward the node is from."""

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")

FACTORIES = (
    "arange", "as_tensor", "empty", "eye", "full", "linspace", "normal", "ones", "rand", "randint", "randn", "tensor",
    "zeros",
)  # fmt: skip
"""Functions of torch that take sizes and devices, and would not know a value that is traced."""


def scope_of(node: fx.Node) -> str:
    """Path of the module whose forward ``node`` is from, "" for the model itself."""
    return str(node.meta.get(SCOPE, ""))


class GraphTracer(DecidingTracer):
    """Traces one module once.

    Args:
        opaque: paths of the modules that stay whole.
        hints: of the values of this trace.
        in_place: write ``x += y`` down as that, and not as ``x = x + y``, also where ``x`` is no view.
    """

    # A buffer is looked up when the graph runs, not when it is made.
    proxy_buffer_attributes = True

    def __init__(self, opaque: Collection[str], hints: Hints, *, in_place: bool = False) -> None:
        super().__init__()
        self.in_place = in_place
        self.opaque = opaque
        self.failed: str | None = None
        """Path of the innermost module that could not be traced; None while it is the model itself."""
        self.by_side = False
        """Tiles of another side might give another graph."""
        self._paths: list[str] = []
        self._hints = hints
        self._decided: dict[tuple[fx.Node, type], Any] = {}

    def trace(self, root: Any, concrete_args: dict[str, Any] | None = None) -> fx.Graph:
        with torch.random.fork_rng(devices=[]), _recording_functions(self):
            self._entered = [_switches()]
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
        if self._hints.at_work:
            return forward(*args, **kwargs)
        path = self.path_of_module(m)
        if self.is_leaf_module(m, path):
            self.by_side = self.by_side or not type(m).__module__.startswith("torch.nn.")
            return super().call_module(m, forward, args, kwargs)
        self._paths.append(path)
        self._entered.append(_switches())
        drawn = _drawn()
        try:
            value = super().call_module(m, forward, args, kwargs)
            if _drawn() != drawn:
                raise fx.proxy.TraceError(f"{path} draws random numbers that do not depend on its input")
        except Exception:
            self.failed = self.failed or path
            raise
        self._paths.pop()
        self._entered.pop()
        return value

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, fx.Proxy]) -> Any:
        if self._hints.at_work:
            return attr_val
        return super().getattr(attr, attr_val, parameter_proxy_cache)

    def create_arg(self, a: Any) -> Any:
        # By its type, not by what it says it is.
        return a.node if issubclass(type(a), fx.Proxy) else super().create_arg(a)

    def create_node(
        self,
        kind: str,
        target: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        name: str | None = None,
        type_expr: Any = None,
    ) -> fx.Node:
        switches = _switches()
        # At the root, a switch of gradients is recorded by ``create_proxy``.
        if switches != self._entered[-1] and (self._paths or switches[1:] != self._entered[-1][1:]):
            raise fx.proxy.TraceError("it switches gradients or autocast, which a graph does not record")
        scope = self._paths[-1] if self._paths else ""
        if scope and name is None and kind in ("call_function", "call_method"):
            called = target if isinstance(target, str) else getattr(target, "__name__", "function")
            name = f"{scope.replace('.', '_')}_{called.strip('_')}"
        node = super().create_node(kind, target, args, kwargs, name, type_expr)
        node.meta[SCOPE] = scope
        with torch.set_grad_enabled(self._entered[0][0]):  # what would flow back is cut off by ``create_proxy``
            self._hints.learn(node)
        return node

    def create_proxy(
        self,
        kind: str,
        target: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        name: str | None = None,
        type_expr: Any = None,
        proxy_factory_fn: Callable[[fx.Node], fx.Proxy] | None = None,
    ) -> Any:
        """What stands for the value of a new node; its elements where it is a list or a dict; None where it is None."""
        proxy: Any = super().create_proxy(kind, target, args, kwargs, name, type_expr, proxy_factory_fn)
        if kind in ("placeholder", "get_attr") or target is detached:
            return proxy
        hint = self._hints.of(proxy.node)
        if self._entered[0][0] and not torch.is_grad_enabled():
            tensors = _tensors(hint.value) if hint else None
            if tensors is None or any(tensor.requires_grad for tensor in tensors):
                if kind == "call_method" and str(target).endswith("_") and not str(target).endswith("__"):
                    raise fx.proxy.TraceError(f"it changes a value in place, by {target}, while gradients are off")
                proxy = self.create_proxy("call_function", detached, (proxy,), {})
                hint = self._hints.of(proxy.node)
        if hint is None or hint.is_tensor:
            return proxy
        match hint.value:
            case None:
                return None
            case list() as values:
                return [proxy[k] for k in range(len(values))]
            case dict() as values if type(values) is dict:
                return {key: proxy[key] for key in values}
        return proxy

    def proxy(self, node: fx.Node) -> fx.Proxy:
        hint = self._hints.of(node)
        # Of a tensor nothing is known without a node that says it; a number or a list may be another.
        self.by_side = self.by_side or hint is None or not hint.is_tensor
        if hint is None:
            return UnknownProxy(node, self)
        number = not hint.is_tensor and isinstance(hint.value, (int, float))
        return (KnownNumber if number else KnownProxy)(node, self, hint)

    def decided(self, proxy: KnownProxy, convert: type) -> Any:
        """``convert`` of what ``proxy`` stands for, on which Python is about to decide; noted in the graph.

        Raises:
            TraceError: it depends on data, on the number of tiles, or in a submodule on type or device.
        """
        hint, node = proxy.hint, proxy.node
        if hint.is_tensor:
            raise fx.proxy.TraceError("its path depends on the values of tensors")
        expected = convert(hint.value)
        if any(convert(value) != expected for value in self._hints.others(node)):
            raise fx.proxy.TraceError("its path depends on the number of tiles in a microbatch")
        if hint.of_type and self._paths:
            raise fx.proxy.TraceError("its path depends on the type, layout or device of a tensor")
        if (node, convert) not in self._decided:
            self._decided[node, convert] = expected
            self.create_node("call_function", as_traced, (node, expected, place()), {})
        return expected


def place() -> str:
    """File and line of the user's code that is being traced."""
    ours = (Path(torch.__file__).parent, Path(__file__).parents[1])
    frame = inspect.currentframe()
    while frame is not None:
        if not any(Path(frame.f_code.co_filename).is_relative_to(folder) for folder in ours):
            return f"{frame.f_code.co_name}, {frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return "unknown"


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


@contextmanager
def _recording_functions(tracer: GraphTracer) -> Iterator[None]:
    """What torch would run on what stands for tensors and sizes becomes nodes: custom autograd functions, factories."""
    apply = torch.autograd.Function.__dict__["apply"]
    factories = {name: getattr(torch, name) for name in FACTORIES}

    def traced(*given: Any) -> bool:
        return any(issubclass(type(leaf), fx.Proxy) for leaf in torch.utils._pytree.tree_leaves(given))

    def applying(function: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
        if traced(args, kwargs):
            if function is checkpoint.CheckpointFunction:
                raise fx.proxy.TraceError("torch.utils.checkpoint with use_reentrant=True hides what it computes")
            return tracer.create_proxy("call_function", applied(function), args, kwargs)
        return apply.__get__(None, function)(*args, **kwargs)

    def making(make: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return (
            tracer.create_proxy("call_function", make, args, kwargs) if traced(args, kwargs) else make(*args, **kwargs)
        )

    def checkpointing(*args: Any, **kwargs: Any) -> Iterator[None]:
        yield  # what is computed again in a split model, --recompute says

    around = {name: made for name, made in vars(checkpoint).items() if name.startswith(CHECKPOINT)}
    vars(checkpoint).update(dict.fromkeys(around, checkpointing))
    torch.autograd.Function.apply = classmethod(applying)
    vars(torch).update({name: functools.partial(making, make) for name, make in factories.items()})
    try:
        yield
    finally:
        torch.autograd.Function.apply = apply
        vars(checkpoint).update(around)
        vars(torch).update(factories)


def _switches() -> tuple[bool, ...]:
    devices = ("cpu", "cuda")
    return (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), *map(torch.is_autocast_enabled, devices))


def _drawn() -> tuple[Any, ...]:
    return random.getstate(), torch.random.get_rng_state().numpy().tobytes()
