"""Arguments, changes and results of operations by their schemas, for ``dispatch``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.cuda._sanitizer import FACTORY_FUNCTION_REGEX

from tests.helpers.sim_gpu.memory import Memory

aten = torch.ops.aten
ON_SHELLS = {
    aten.set_.source_Storage,
    aten.set_.source_Storage_storage_offset,
    aten.set_.source_Tensor,
    aten.lift_fresh.default,
    aten._conj.default,
}
"""Operations that only say where a tensor lies, and whose schema does not tell."""
INDEXES = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}
"""Operations that take indices from the host, too, and copy them."""


def tree_map(function: Callable[[Any], Any], value: Any) -> Any:
    """Map over what operations take and give; several times faster than torch's."""
    if isinstance(value, (list, tuple)):
        return type(value)([tree_map(function, each) for each in value])
    if isinstance(value, dict):
        return {name: tree_map(function, each) for name, each in value.items()}
    return function(value)


def tree_leaves(value: Any) -> list[Any]:
    """Everything that is no list, tuple or dict."""
    if isinstance(value, (list, tuple)):
        return [leaf for each in value for leaf in tree_leaves(each)]
    if isinstance(value, dict):
        return [leaf for each in value.values() for leaf in tree_leaves(each)]
    return [value]


def computes(func: Any) -> bool:
    """An operation uses the values of what it is given."""
    return not (func.is_view or func in ON_SHELLS or FACTORY_FUNCTION_REGEX.match(func._schema.name))


def new_of(func: Any, made: Any) -> list[Tensor]:
    """The new tensors among what an operation gave."""
    returns = func._schema.returns
    pairs = zip(returns, made if len(returns) > 1 else [made], strict=True) if returns else ()
    new = [value for returned, value in pairs if returned.alias_info is None or not returned.alias_info.is_write]
    return [leaf for leaf in tree_leaves(new) if isinstance(leaf, Tensor)]


def one_device(
    func: Any, memories: list[tuple[Tensor, Memory | None]], asked: torch.device | None, current: int
) -> int | None:
    """The device that an operation runs on, None for the host.

    Raises:
        RuntimeError: its tensors are on several.
    """
    if asked is not None:
        if asked.type == "cuda":
            return current if asked.index is None else asked.index
        if asked.type == "cpu":
            return None
    devices = {memory.device for _, memory in memories if memory is not None and memory.device is not None}
    host = [tensor for tensor, memory in memories if memory is None or memory.device is None]
    if not devices:
        return None
    strays = [tensor for tensor in host if tensor.dim()]
    if func in INDEXES and memories[0][1] is not None:
        strays = [tensor for tensor in strays if tensor.dtype.is_floating_point]
    if len(devices) > 1 or strays:
        names = sorted(f"cuda:{device}" for device in devices) + (["cpu"] if strays else [])
        raise RuntimeError(f"Expected all tensors to be on the same device, but found {', '.join(names)} ({func})")
    return devices.pop()


def written_by(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The tensors that an operation changes, by its schema."""
    found: list[Tensor] = []
    for name, value in arguments_of(func, args, kwargs):
        if name.alias_info is not None and name.alias_info.is_write:
            found += [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
    if func in (aten.native_batch_norm.default, aten.cudnn_batch_norm.default) and args[5]:
        found += [value for value in args[3:5] if value is not None]  # its schema keeps silent on them
    return found


def arguments_of(func: Any, args: Any, kwargs: Any) -> Iterator[tuple[Any, Any]]:
    arguments = func._schema.arguments
    yield from zip(arguments, args, strict=False)
    for argument in arguments[len(args) :]:
        if argument.name in kwargs:
            yield argument, kwargs[argument.name]


def by_mask(func: Any, args: Any) -> bool:
    indices = tree_leaves(args[1]) if func in INDEXES else []
    return any(isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8) for index in indices)


def meta_of(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    return torch.empty_strided(leaf.size(), leaf.stride(), dtype=leaf.dtype, device="meta")


def zeros_of(leaf: Tensor) -> Tensor:
    return torch.empty_strided(leaf.size(), leaf.stride(), dtype=leaf.dtype).zero_()


def empty_for_meta(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor) or not leaf.is_meta:
        return leaf
    return torch.empty_strided(leaf.size(), leaf.stride(), dtype=leaf.dtype)


def is_elsewhere(tensor: Tensor) -> bool:
    return torch._C.TensorBase.device.__get__(tensor).type != "cpu" or tensor.layout is not torch.strided  # type: ignore[attr-defined]


@functools.cache
def is_composite(func: Any) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")


def is_faked() -> bool:
    """Torch's fake tensors are on, whose mode comes below all others."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def is_meta(kwargs: dict[str, Any]) -> bool:
    return kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "meta"
