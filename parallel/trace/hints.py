"""Hints of the values of a model while it is traced: shapes, types and structure, without data.

Each node has a hint of its value for the traced number of tiles, and where it is asked for of that for another number.
What is the same in both does not depend on how many tiles a microbatch has, and Python may decide by it.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.utils._pytree import tree_any

from parallel.trace.python_random import preserve_python_state

OF_TYPE = {
    "data_ptr", "device", "dtype", "element_size", "get_device", "grad_fn", "is_contiguous", "is_cpu", "is_cuda",
    "is_inference", "is_leaf", "is_meta", "itemsize", "layout", "nbytes", "requires_grad", "storage_offset", "stride",
    "type",
}  # fmt: skip
"""What a tensor says of itself besides its shape: another device, layout or precision changes it."""


SURE_MODULES = frozenset({
    nn.AdaptiveAvgPool2d, nn.AvgPool2d, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.Conv1d, nn.Conv2d, nn.Conv3d,
    nn.ConvTranspose2d, nn.Dropout, nn.Dropout2d, nn.Flatten, nn.GELU, nn.GroupNorm, nn.Hardswish, nn.Identity,
    nn.InstanceNorm2d, nn.Linear, nn.ReLU, nn.ReLU6, nn.SiLU, nn.Sigmoid, nn.Upsample,
})  # fmt: skip
SURE_FUNCTIONS = frozenset({operator.add, operator.mul, torch.add, torch.flatten, torch.relu})
SURE_METHODS = frozenset({"flatten", "mean", "relu"})
"""They return one tensor where they are given tensors: this is known without a run."""


class Hint:
    """Value of a node, as far as it is known.

    Args:
        value: for the traced number of tiles.
        of_type: it depends on type, device, layout or on whether gradients are taken.
        find: calls ``set`` with the value, a tensor that was not asked for yet.
    """

    __slots__ = ("_find", "_value", "is_tensor", "of_type")

    def __init__(self, value: Any, of_type: bool, find: Callable[[], None] | None = None) -> None:
        self._value, self._find, self.of_type = value, find, of_type
        self.is_tensor = find is not None or isinstance(value, Tensor)

    @property
    def value(self) -> Any:
        """Return the value for the traced number of tiles; a TraceError where the node does not run on them."""
        if self._find is not None:
            self._find()
        if isinstance(self._value, Exception):
            raise fx.proxy.TraceError(f"it does not run: {self._value}") from self._value
        return self._value

    def set(self, value: Any) -> None:
        """Store the value, or the exception that computing it raised."""
        self._value, self._find = value, None


class Hints:
    """The hints of the nodes of one trace; ``running``: modules are run for their hints now, and not to be traced."""

    def __init__(self, root: nn.Module, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self._root = root
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._known: dict[fx.Node, Hint] = {}
        self._others: dict[fx.Node, Any] = {}
        self._behind: list[fx.Node] = []
        """Nodes that are still to be run on the other number of tiles: few models decide by anything."""
        self._put_off: list[fx.Node] = []
        """Nodes whose value was not asked for yet."""
        self._grad = torch.is_grad_enabled()
        self.running = False
        device = next((tensor.device for tensor in (*root.parameters(), *root.buffers())), torch.device("cpu"))
        other = (2 if shape[0] == 1 else 1, *shape[1:]) if shape else shape
        with self._mode:
            self._inputs = tuple(torch.empty(size, dtype=dtype, device=device) for size in (shape, other))

    def of(self, node: fx.Node) -> Hint | None:
        """Return the hint of ``node``, None where it is not known without data."""
        return self._known.get(node)

    def learn(self, node: fx.Node) -> None:
        """Find out what ``node`` gives, from what its inputs are."""
        if node.op == "placeholder":
            self._grad = torch.is_grad_enabled()
            self._known[node], self._others[node] = Hint(self._inputs[0], of_type=False), self._inputs[1]
            return
        arguments = node.all_input_nodes
        if node.op == "output" or any(argument not in self._known for argument in arguments):
            return
        if arguments and all(self._known[argument].is_tensor for argument in arguments) and self._is_sure(node):
            self._known[node] = Hint(None, False, self._find)
            self._put_off.append(node)
            self._behind.append(node)
            return
        self._find()
        with contextlib.suppress(Exception):  # the run without data says what is wrong
            value = self._run(node, lambda argument: self._known[argument].value)
            self._known[node] = Hint(value, self._is_of_type(node, value))
            self._behind.append(node)
            if not self._is_of_torch(node):  # others' code may count its calls
                self._catch_up()

    def _find(self) -> None:
        """Run what was deferred, in order: something may be changed in place."""
        while self._put_off:
            node = self._put_off.pop(0)
            try:
                self._known[node].set(self._run(node, lambda argument: self._known[argument].value))
            except Exception as fault:  # the run without data says what is wrong
                self._known[node].set(fault)

    def _is_sure(self, node: fx.Node) -> bool:
        if node.op == "call_module":
            module = self._root.get_submodule(str(node.target))
            hooked = module._forward_hooks or module._forward_pre_hooks
            return type(module) in SURE_MODULES and "forward" not in vars(module) and not hooked and not node.kwargs
        if node.op == "call_function":
            return node.target in SURE_FUNCTIONS and not node.kwargs
        return node.op == "call_method" and node.target in SURE_METHODS and not node.kwargs

    def others(self, node: fx.Node) -> tuple[Any, ...]:
        """Return what ``node`` gives for another number of tiles; nothing where the model cannot run on that."""
        self._catch_up()
        return (self._others[node],) if node in self._others else ()

    def _catch_up(self) -> None:
        for node in self._behind:
            if all(argument in self._others for argument in node.all_input_nodes):
                with contextlib.suppress(Exception):
                    self._others[node] = self._run(node, self._others.__getitem__)
        self._behind.clear()

    def _is_of_torch(self, node: fx.Node) -> bool:
        if node.op == "call_module":
            return type(self._root.get_submodule(str(node.target))).__module__.startswith("torch.nn.")
        module = getattr(node.target, "__module__", None) if node.op == "call_function" else None
        return (module or "torch").split(".")[0] in ("torch", "_operator", "builtins")

    def _run(self, node: fx.Node, value_of: Callable[[fx.Node], Any]) -> Any:
        args, kwargs = fx.map_arg((node.args, node.kwargs), value_of)
        args, kwargs = _plain(args), _plain(kwargs)
        with self._running(node):
            match node.op:
                case "get_attr":
                    return operator.attrgetter(str(node.target))(self._root)
                case "call_module":
                    return self._root.get_submodule(str(node.target))(*args, **kwargs)
                case "call_method":
                    return getattr(args[0], str(node.target))(*args[1:], **kwargs)
            assert callable(node.target)
            return node.target(*args, **kwargs)

    @contextlib.contextmanager
    def _running(self, node: fx.Node) -> Iterator[None]:
        """Run ``node`` without data, with gradients as outside, and with nothing drawn from the generators."""
        # Only a user's code draws from Python's, whose states take longer to keep than most nodes to run.
        is_user_code = not self._is_sure(node) and (node.op == "call_module" or not self._is_of_torch(node))
        preserved = preserve_python_state() if is_user_code else contextlib.nullcontext()
        normalized, self.running = functional.batch_norm, True
        functional.batch_norm = _like  # type: ignore[assignment]
        try:
            with self._mode, torch.set_grad_enabled(self._grad), torch.random.fork_rng(devices=[]), preserved:
                yield
        finally:
            self.running, functional.batch_norm = False, normalized

    def _is_of_type(self, node: fx.Node, value: Any) -> bool:
        if tree_any(lambda leaf: isinstance(leaf, Tensor), value):
            return False
        attribute = node.args[1] if node.target is getattr else node.target
        return attribute in OF_TYPE or any(self._known[argument].of_type for argument in node.all_input_nodes)


def _like(images: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Stand in for batch norm, which is taken apart without data, and takes most of the time."""
    tensors = (images, *args, *kwargs.values())
    differentiable = any(isinstance(tensor, Tensor) and tensor.requires_grad for tensor in tensors)
    return torch.empty_like(images, requires_grad=differentiable).clone()  # which may be changed in place


def _plain(value: Any) -> Any:
    """Return fx's immutable lists and dicts as those of Python."""
    if isinstance(value, tuple):
        plain = [_plain(element) for element in value]
        return type(value)(*plain) if hasattr(value, "_fields") else tuple(plain)
    if isinstance(value, list):
        return [_plain(element) for element in value]
    if isinstance(value, dict):
        return {key: _plain(element) for key, element in value.items()}
    return value


@contextlib.contextmanager
def any_number_of_values() -> Iterator[None]:
    """Let batch norm in training take one value per channel, too: plans are made of one tile, and scaled."""
    checked = vars(functional)["_verify_batch_size"]
    vars(functional)["_verify_batch_size"] = lambda size: None
    try:
        yield
    finally:
        vars(functional)["_verify_batch_size"] = checked
