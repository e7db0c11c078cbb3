"""A context in which a model may run without training it: at its end, the model is as it was.

Takes a module; gives a context manager. Forward passes set attributes, change buffers, install hooks (`transformers`
does so at the first call), and fill lists. Every place that runs a model to learn about it does so in this context.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

CONTAINERS = (dict, OrderedDict, defaultdict, list, set, deque)
"""Types whose contents are put back; a type derived from them may do more than hold values."""


@contextmanager
def left_as_it_was(module: nn.Module, *, parameters: bool = False) -> Iterator[None]:
    """Put back, at the end, attributes, hooks, modes, submodules and buffers of ``module`` and all its submodules, the
    contents of containers and the values of tensors that attributes hold.

    Args:
        parameters: their values, too; not needed where a run has no data, or is given copies of them.
    """
    attributes = [(vars(submodule), dict(vars(submodule))) for submodule in module.modules()]
    contents: dict[int, tuple[Any, Any]] = {}
    tensors: dict[int, tuple[Tensor, Tensor, int, bool, Tensor | None]] = {}
    for _, values in attributes:
        for value in values.values():
            _save(value, contents, tensors, parameters)
    try:
        yield
    finally:
        for held, values in attributes:
            held.clear()
            held.update(values)
        for container, content in contents.values():
            _fill(container, content)
        for tensor, memory, version, trained, copy in tensors.values():
            if not _same_memory(tensor, memory):
                tensor.data = memory
            if tensor.is_leaf and tensor.requires_grad != trained:
                tensor.requires_grad_(trained)
            if copy is not None and (tensor._version != version or not _same_values(tensor, copy)):
                with torch.no_grad():
                    tensor.copy_(copy)


def _save(value: Any, contents: dict[int, tuple[Any, Any]], tensors: dict[int, Any], parameters: bool) -> None:
    if isinstance(value, Tensor):
        if id(value) not in tensors and not nn.parameter.is_lazy(value) and value.layout is torch.strided:
            copy = value.detach().clone() if parameters or not isinstance(value, nn.Parameter) else None
            tensors[id(value)] = value, value.detach(), value._version, value.requires_grad, copy
    elif isinstance(value, tuple):
        for element in value:
            _save(element, contents, tensors, parameters)
    elif type(value) in CONTAINERS and id(value) not in contents:
        contents[id(value)] = value, value.copy()
        for element in value.values() if isinstance(value, dict) else value:
            _save(element, contents, tensors, parameters)


def _fill(container: Any, content: Any) -> None:
    container.clear()
    if isinstance(container, (dict, set)):
        container.update(content)
    else:
        container.extend(content)


def _same_memory(tensor: Tensor, memory: Tensor) -> bool:
    same = tensor.shape == memory.shape and tensor.stride() == memory.stride()
    return same and tensor.untyped_storage()._cdata == memory.untyped_storage()._cdata


def _same_values(tensor: Tensor, copy: Tensor) -> bool:
    """Return False where values are known to differ: ``x.data.mul_(2)`` counts as no change of ``x``."""
    return isinstance(tensor, FakeTensor) or tensor.is_meta or torch.equal(tensor, copy)
