"""Methods of tensors, and what makes tensors, as they are with simulated GPUs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from tests.helpers.sim_gpu.gpus import Gpus

CHANGED = ("to", "tolist", "numpy", "record_stream", "__deepcopy__", "__reduce_ex__")
PLAIN = {name: getattr(Tensor, name) for name in CHANGED}
MAKERS = ("empty", "empty_strided", "zeros", "ones", "full", "arange", "linspace", "eye", "rand", "randn", "randint")
LIKE = ("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like")
FACTORIES = {name: getattr(torch, name) for name in (*MAKERS, *LIKE, "randperm")}
NEW = {name: getattr(Tensor, name) for name in ("new_empty", "new_zeros", "new_ones", "new_full", "new_empty_strided")}
AS_TENSOR = {name: getattr(torch, name) for name in ("tensor", "as_tensor")}


def tensor_methods(gpus: Gpus) -> dict[str, Any]:
    of_base = torch._C.TensorBase.device.__get__  # type: ignore[attr-defined]

    def device(tensor: Tensor) -> torch.device:
        index = gpus.device_of(tensor)
        return of_base(tensor) if index is None else torch.device("cuda", index)

    def to(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        copy = kwargs.pop("copy", False)
        if args and isinstance(args[0], Tensor):
            args = (args[0].device, args[0].dtype, *args[1:])
        where, dtype, non_blocking, memory_format = torch._C._nn._parse_to(*args, **kwargs)
        if where is not None and where.type == "meta":
            return PLAIN["to"](tensor, where)  # type: ignore[no-any-return]
        target = device(tensor) if where is None else where
        index, here = gpus.index(target), gpus.device_of(tensor)
        same = index == here and dtype in (None, tensor.dtype)
        if index == here and not copy and (same or dtype is not None) and memory_format is None:
            return tensor if same else PLAIN["to"](tensor, dtype)  # type: ignore[no-any-return]
        if index == here:
            given = {} if memory_format is None else {"memory_format": memory_format}
            return PLAIN["to"](tensor, dtype or tensor.dtype, copy=copy, **given)  # type: ignore[no-any-return]
        target = torch.device("cpu") if index is None else torch.device("cuda", index)
        return Moved.apply(tensor, target, dtype, non_blocking, memory_format)  # type: ignore[no-any-return]

    class Moved(torch.autograd.Function):
        """A copy to another device; its gradient comes back."""

        @staticmethod
        def forward(ctx: Any, tensor: Tensor, where: Any, dtype: Any, non_blocking: bool, memory_format: Any) -> Tensor:
            ctx.back = device(tensor), tensor.dtype
            with gpus.from_python():
                return torch.ops.aten._to_copy.default(  # type: ignore[no-any-return]
                    tensor, device=where, dtype=dtype, non_blocking=non_blocking, memory_format=memory_format
                )

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
            return to(gradient, *ctx.back), None, None, None, None

    def record_stream(tensor: Tensor, stream: Any) -> None:
        memory = gpus.memories.of(tensor)
        assert memory is not None, "record_stream of a tensor on the CPU"
        memory.recorded.add(stream.line)

    def tolist(tensor: Tensor) -> Any:
        return PLAIN["tolist"](to(tensor, "cpu"))

    def numpy(tensor: Tensor, **kwargs: Any) -> Any:
        if gpus.device_of(tensor) is not None:
            raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first.")
        return PLAIN["numpy"](tensor, **kwargs)

    def is_pinned(tensor: Tensor, device: Any = None) -> bool:
        memory = gpus.memories.of(tensor)
        return memory is not None and memory.device is None

    return {
        **_tensor_copies(gpus, to),
        "device": property(device),
        "is_cuda": property(lambda tensor: gpus.device_of(tensor) is not None),
        "is_cpu": property(lambda tensor: device(tensor).type == "cpu"),
        "to": to,
        "cuda": lambda tensor, where=None, non_blocking=False: to(tensor, where or "cuda", non_blocking=non_blocking),
        "cpu": lambda tensor: to(tensor, "cpu"),
        "get_device": lambda tensor: -1 if gpus.device_of(tensor) is None else gpus.device_of(tensor),
        "pin_memory": lambda tensor, where=None: torch.ops.aten._pin_memory.default(tensor),
        "is_pinned": is_pinned,
        "record_stream": record_stream,
        "tolist": tolist,
        "numpy": numpy,
    }


def _tensor_copies(gpus: Gpus, to: Callable[..., Tensor]) -> dict[str, Any]:
    def deepcopy(tensor: Tensor, memo: dict[int, Any]) -> Tensor:
        if gpus.device_of(tensor) is None:
            return PLAIN["__deepcopy__"](tensor, memo)  # type: ignore[no-any-return]
        if id(tensor) not in memo:
            copied = tensor.detach().clone()
            asks = tensor.requires_grad
            is_parameter = isinstance(tensor, torch.nn.Parameter)
            memo[id(tensor)] = torch.nn.Parameter(copied, asks) if is_parameter else copied.requires_grad_(asks)
        return memo[id(tensor)]  # type: ignore[no-any-return]

    def reduce(tensor: Tensor, protocol: int) -> Any:
        """Value that ``torch.save`` writes; it is read back on the CPU."""
        if gpus.device_of(tensor) is not None:
            tensor = to(tensor.detach(), "cpu").requires_grad_(tensor.requires_grad)
        return PLAIN["__reduce_ex__"](tensor, protocol)

    def new_tensor(tensor: Tensor, data: Any, dtype: Any = None, device: Any = None, **kwargs: Any) -> Tensor:
        return torch.tensor(data, dtype=dtype or tensor.dtype, device=device or tensor.device, **kwargs)

    return {"__deepcopy__": deepcopy, "__reduce_ex__": reduce, "new_tensor": new_tensor}


def made_on_host(plain: Any, *args: Any, device: Any = None, pin_memory: bool = False, **kwargs: Any) -> Tensor:
    """``torch.tensor`` and ``torch.as_tensor``, which ask for a device where no simulation sees it."""
    made: Tensor = plain(*args, **kwargs)
    if pin_memory:
        made = made.pin_memory()
    if device is None or made.device == torch.device(device):
        return made
    return made.detach().to(device).requires_grad_(made.requires_grad)


def saying_its_device(gpus: Gpus, plain: Any) -> Any:
    """A factory that Python calls: if it says that it makes something on the CPU, that is meant. C++ within other
    operations says the same of all tensors."""

    @functools.wraps(plain)
    def made(*args: Any, **kwargs: Any) -> Tensor:
        if plain in NEW.values():
            kwargs.setdefault("device", args[0].device)
        with gpus.from_python():
            return plain(*args, **kwargs)  # type: ignore[no-any-return]

    return made
