"""The fx tracer behind ``trace``: what it looks into, how values are called, and what it refuses to record.

A graph has no place for autocast regions, hooks, assigned buffers, numbers drawn while tracing, or for decisions by
data or by the number of tiles; a module that has any of these fails to trace, is named in ``failed``, and is kept whole
in the next attempt. Decisions by the size of a tile are taken as for the traced size, and noted.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules.batchnorm import _NormBase
from torch.utils import checkpoint

from parallel.trace.hints import Hints
from parallel.trace.known_proxy import KnownNumber, KnownProxy, UnknownProxy, applied, as_traced, constant, detached
from parallel.trace.op_recorder import tensors_of
from parallel.trace.python_random import python_state

_NOT_OF_USERS = tuple(f"{folder}{os.sep}" for folder in (Path(torch.__file__).parent, Path(__file__).parents[1]))

SCOPE = "scope"
"""Key in a node's ``meta``: path of the module whose forward the node is from."""

CHECKPOINT = "_checkpoint_without_reentrant_generator"
"""What torch.utils.checkpoint puts around a part of a model, begins with this; the end depends on torch's version."""

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")

FACTORIES = (
    "arange", "as_tensor", "empty", "eye", "full", "linspace", "normal", "ones", "rand", "randint", "randn", "tensor",
    "zeros",
)  # fmt: skip
"""Functions of torch that take sizes and devices, and would not know a value that is traced."""


def scope_of(node: fx.Node) -> str:
    """Return the path of the module whose forward ``node`` is from, "" for the model itself."""
    return str(node.meta.get(SCOPE, ""))


class GraphTracer(fx.Tracer):
    """The tracer of one trace of one module.

    Args:
        opaque: paths of the modules that stay whole.
        hints: of the values of this trace.
        in_place: write ``x += y`` down as that, and not as ``x = x + y``, also where ``x`` is no view.

    Attributes:
        failed: path of the innermost module that could not be traced; None while it is the model itself.
        by_side: tiles of another side might give another graph.
    """

    # A buffer is looked up when the graph runs, not when it is made.
    proxy_buffer_attributes = True

    def __init__(self, opaque: Collection[str], hints: Hints, *, in_place: bool = False) -> None:
        super().__init__()
        self.in_place = in_place
        self.opaque = opaque
        self.failed: str | None = None
        self.by_side = False
        self._paths: list[str] = []
        self._hints = hints
        self._decided: dict[tuple[fx.Node, type], Any] = {}

    def trace(self, root: Any, concrete_args: dict[str, Any] | None = None) -> fx.Graph:
        """Return the graph of ``root`` in its present mode; a TraceError where it does what no graph records."""
        with torch.random.fork_rng(devices=[]), _recording_functions(self):
            self._entered = [_switches()]
            before = _random_state()
            graph = super().trace(root, concrete_args)
            if _random_state() != before:
                raise fx.proxy.TraceError("it draws random numbers that do not depend on its input")
            _refuse_assigned(root)
        return graph

    def create_args_for_root(self, root_fn: Any, is_module: bool, concrete_args: Any = None) -> tuple[Any, list[Any]]:
        """Return the model's forward and what it is called with: one tensor; other arguments keep their defaults."""
        if any(getattr(self.root, hooks) for hooks in HOOKS):
            raise fx.proxy.TraceError("hooks of the model itself would run in no stage; put them on its submodules")
        names = [
            p.name for p in inspect.signature(inspect.unwrap(root_fn)).parameters.values() if p.kind != p.VAR_POSITIONAL
        ]
        return root_fn, [self.root, self.create_proxy("placeholder", names[1] if len(names) > 1 else "x", (), {})]

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Return whether ``m`` is one layer."""
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
        """Return what stands for the value of ``m``, as one node or traced."""
        if self._hints.running:
            return forward(*args, **kwargs)
        path = self.path_of_module(m)
        if self.is_leaf_module(m, path):
            self.by_side = self.by_side or not type(m).forward.__module__.startswith("torch.nn.")
            return super().call_module(m, forward, args, kwargs)
        self._paths.append(path)
        self._entered.append(_switches())
        before = _random_state()
        try:
            value = super().call_module(m, forward, args, kwargs)
            if _random_state() != before:
                raise fx.proxy.TraceError(f"{path} draws random numbers that do not depend on its input")
            _refuse_assigned(m)
        except Exception:
            self.failed = self.failed or path
            raise
        self._paths.pop()
        self._entered.pop()
        return value

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, fx.Proxy]) -> Any:
        """Return what stands for an attribute of a module."""
        if self._hints.running:
            return attr_val
        return super().getattr(attr, attr_val, parameter_proxy_cache)

    def create_arg(self, a: Any) -> Any:
        """Return ``a`` as an argument of a node; a proxy by its type, not by what it says it is."""
        if issubclass(type(a), fx.Proxy):
            return a.node
        if isinstance(a, Tensor) and not isinstance(a, nn.Parameter) and not self._is_of_model(a):
            if isinstance(a, FakeTensor) or a.requires_grad or a.device.type != "cpu" or not a.numel():
                raise fx.proxy.TraceError(
                    "it computes with a tensor that is not among its arguments, as where a hook keeps what a layer gave"
                )
            values = bytes(a.detach().contiguous().reshape(-1).view(torch.uint8).numpy())
            return self.create_node("call_function", constant(values, a.dtype, a.shape), (), {})
        return super().create_arg(a)

    def _is_of_model(self, tensor: Tensor) -> bool:
        """Return whether ``tensor`` is a buffer, or an attribute of a module."""
        return tensor in self.tensor_attrs or any(tensor is buffer for buffer in self.root.buffers())

    def create_node(
        self, kind: str, target: Any, args: Any, kwargs: Any, name: str | None = None, type_expr: Any = None
    ) -> fx.Node:
        """Return a new node, named after the module it is from, whose value the hints have learnt."""
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

    def create_proxy(self, kind: str, target: Any, args: Any, kwargs: Any, *more: Any, **options: Any) -> Any:
        """Return what stands for the value of a new node; its elements where it is a list or a dict; None where it is
        None."""
        proxy: Any = super().create_proxy(kind, target, args, kwargs, *more, **options)
        if kind in ("placeholder", "get_attr") or target is detached:
            return proxy
        hint = self._hints.of(proxy.node)
        if self._entered[0][0] and not torch.is_grad_enabled():
            tensors = tensors_of(hint.value) if hint else None
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
        """Return what stands for the value of ``node``, by its hint."""
        hint = self._hints.of(node)
        # Of a tensor nothing is known without a node that says it; a number or a list may be another.
        self.by_side = self.by_side or hint is None or not hint.is_tensor
        if hint is None:
            return UnknownProxy(node, self)
        number = not hint.is_tensor and isinstance(hint.value, (int, float))
        return (KnownNumber if number else KnownProxy)(node, self, hint)

    def decided(self, proxy: KnownProxy, convert: type) -> Any:
        """Return ``convert`` of what ``proxy`` stands for, on which Python is about to decide; note it in the graph."""
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
            where = next((line for _, line in user_frames()), "unknown")
            self.create_node("call_function", as_traced, (node, expected, where), {})
        return expected


def user_line(code: CodeType, number: int) -> str:
    """Return function, file and line of ``code``; "" where it is torch's or ours."""
    if code.co_filename.startswith(_NOT_OF_USERS):
        return ""
    return f"{code.co_name}, {code.co_filename}:{number}"


def user_frames() -> Iterator[tuple[FrameType, str]]:
    """Yield the frames of the user's code that are at work, innermost first, each with its line."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if line := user_line(frame.f_code, frame.f_lineno):
            yield frame, line
        frame = frame.f_back


def _refuse_assigned(module: nn.Module) -> None:
    """Refuse a forward that has assigned to a buffer of ``module`` or of one inside it: no graph records that."""
    for submodule in module.modules():
        for name, value in submodule._buffers.items():
            if issubclass(type(value), fx.Proxy):
                raise fx.proxy.TraceError(f"it assigns to the buffer {name} of {type(submodule).__name__}")


@contextmanager
def _recording_functions(tracer: GraphTracer) -> Iterator[None]:
    """Record as nodes what torch would run on proxies: custom autograd functions, factories."""
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

    generators = {name: made for name, made in vars(checkpoint).items() if name.startswith(CHECKPOINT)}
    vars(checkpoint).update(dict.fromkeys(generators, checkpointing))
    torch.autograd.Function.apply = classmethod(applying)
    vars(torch).update({name: functools.partial(making, make) for name, make in factories.items()})
    try:
        yield
    finally:
        torch.autograd.Function.apply = apply
        vars(checkpoint).update(generators)
        vars(torch).update(factories)


def _switches() -> tuple[bool, ...]:
    """Return how gradients and autocast are switched."""
    devices = ("cpu", "cuda")
    return (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), *map(torch.is_autocast_enabled, devices))


def _random_state() -> tuple[bytes, bytes]:
    return python_state(), torch.random.get_rng_state().numpy().tobytes()
