"""What the values of a model are while it is traced: shapes, types and structure, without data.

Takes nodes as a tracer records them; gives a ``Hint`` for each: its value for the traced number of tiles and for
another. What is the same in both does not depend on how many tiles a microbatch has, and Python may decide by it.
"""

from __future__ import annotations

import contextlib
import operator
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.utils._pytree import tree_any

OF_TYPE = {
    "data_ptr", "device", "dtype", "element_size", "get_device", "grad_fn", "is_contiguous", "is_cpu", "is_cuda",
    "is_inference", "is_leaf", "is_meta", "itemsize", "layout", "nbytes", "requires_grad", "storage_offset", "stride",
    "type",
}  # fmt: skip
"""What a tensor says of itself beside its shape: another device, layout or precision changes it."""


@dataclass(frozen=True, slots=True)
class Hint:
    """What a node gives.

    Attributes:
        values: for the traced number of tiles, and for another; only the first where the model cannot run on the other.
        of_type: it depends on type, device, layout or on whether gradients are taken.
    """

    values: tuple[Any, ...]
    of_type: bool

    @property
    def value(self) -> Any:
        """For the traced number of tiles."""
        return self.values[0]


class Hints:
    """Hints of the nodes of one trace.

    Args:
        root: the model; its parameters say on which device it runs.
        shape: (n, ...) of its input.
        dtype: of its input.
    """

    def __init__(self, root: nn.Module, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self._root = root
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._known: dict[fx.Node, Hint] = {}
        self.at_work = False
        """Modules are run for their hints now, and not to be traced."""
        device = next((tensor.device for tensor in (*root.parameters(), *root.buffers())), torch.device("cpu"))
        other = (2 if shape[0] == 1 else 1, *shape[1:]) if shape else shape
        with self._mode:
            self._inputs = tuple(torch.empty(size, dtype=dtype, device=device) for size in (shape, other))

    def of(self, node: fx.Node) -> Hint | None:
        """None where nobody knows without data."""
        return self._known.get(node)

    def learn(self, node: fx.Node) -> None:
        """Find out what ``node`` gives, from what its inputs are."""
        if node.op == "placeholder":
            self._known[node] = Hint(self._inputs, of_type=False)
            return
        arguments = node.all_input_nodes
        if node.op == "output" or any(argument not in self._known for argument in arguments):
            return
        sides = min((len(self._known[argument].values) for argument in arguments), default=len(self._inputs))
        values = []
        for side in range(sides):
            with contextlib.suppress(Exception):  # the run without data says what is wrong
                values.append(self._run(node, side))
                continue
            break
        if values:
            self._known[node] = Hint(tuple(values), self._is_of_type(node, values[0]))

    def _run(self, node: fx.Node, side: int) -> Any:
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda argument: self._known[argument].values[side])
        args, kwargs = _plain(args), _plain(kwargs)
        with self._running():
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
    def _running(self) -> Iterator[None]:
        """Without data, with gradients as outside, and with nothing drawn from the generators."""
        before, normalized, self.at_work = random.getstate(), functional.batch_norm, True
        functional.batch_norm = _like  # type: ignore[assignment]
        try:
            with self._mode, torch.random.fork_rng(devices=[]):
                yield
        finally:
            self.at_work, functional.batch_norm = False, normalized
            random.setstate(before)

    def _is_of_type(self, node: fx.Node, value: Any) -> bool:
        if tree_any(lambda leaf: isinstance(leaf, Tensor), value):
            return False
        asked = node.args[1] if node.target is getattr else node.target
        return asked in OF_TYPE or any(self._known[argument].of_type for argument in node.all_input_nodes)


def _like(images: Tensor, *others: Any, **more: Any) -> Tensor:
    """In place of batch norm, which is taken apart without data, and takes most of the time."""
    tensors = (images, *others, *more.values())
    differentiable = any(isinstance(tensor, Tensor) and tensor.requires_grad for tensor in tensors)
    return torch.empty_like(images, requires_grad=differentiable).clone()  # which may be changed in place


def _plain(value: Any) -> Any:
    """fx's immutable lists and dicts as those of Python."""
    if isinstance(value, tuple):
        plain = [_plain(each) for each in value]
        return type(value)(*plain) if hasattr(value, "_fields") else tuple(plain)
    if isinstance(value, list):
        return [_plain(each) for each in value]
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    return value


@contextlib.contextmanager
def any_number_of_values() -> Iterator[None]:
    """Batch norm in training takes one value per channel, too: plans are made of one tile, and scaled."""
    checked = vars(functional)["_verify_batch_size"]
    vars(functional)["_verify_batch_size"] = lambda size: None
    try:
        yield
    finally:
        vars(functional)["_verify_batch_size"] = checked
