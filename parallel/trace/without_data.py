"""Run a model to learn about it: without data where it never looks at its data, else on real tiles."""

from __future__ import annotations

import functools
import threading
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedFakeTensorException,
)

from parallel.comm.communicator import Communicator

ONE_AT_A_TIME = threading.RLock()
"""Held while a model is traced or run without data: ``nn.Module.__call__`` and torch's way to call operations are then
changed for all threads of the process, and generators are watched."""

SIDES = (32, 64, 128, 224, 256, 512)
"""Sides in px of tiles on which a model that looks at its data is run, before those of the run, which may be large."""

CONTAINERS = frozenset({dict, OrderedDict, defaultdict, list, set, deque})
"""Types whose contents are put back; a type derived from them may do more than hold values."""
PLAIN = frozenset({bool, int, float, str, type(None)})
"""Types of attributes in which nothing can change."""

NEEDS_DATA = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    NotImplementedError,
)
"""Faults of a run without data that say nothing about one with data."""

LARGEST_RUN = 512
"""px of tiles on which a model is run that names no size of its own, where a run without data fails."""


@dataclass(frozen=True)
class Trial:
    """Tiles that a model may be run on; ``fake`` is the mode in which tensors have no data, None where they have."""

    example: Tensor
    fake: FakeTensorMode | None = None

    @property
    def mode(self) -> AbstractContextManager[Any]:
        """Return the context of a run."""
        return self.fake or nullcontext()

    def values(self, module: nn.Module) -> dict[int, Tensor]:
        """Return by id what takes the place of each parameter and buffer of ``module``; for one run, which may change
        it."""
        if self.fake is None:
            return replacements(module, copy_of)
        return replacements(module, functools.partial(empty_like, device=self.example.device, fake=self.fake))


def trials(
    module: nn.Module,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    *,
    device: torch.device | None = None,
    sides: tuple[int, ...] = SIDES,
    fill: Callable[..., Tensor] = torch.zeros,
) -> Iterator[Trial]:
    """Yield what ``module`` may be run on: tiles without data first; for a model that looks at its data small tiles,
    then those of ``shape``.

    Args:
        shape: (n, ...) of a microbatch.
        device: of the run without data; that of the parameters unless given.
        fill: makes the data.
    """
    own = next((tensor.device for tensor in state_of(module).values()), torch.device("cpu"))
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with fake:
        example = torch.empty(shape, dtype=dtype, device=device or own)
    yield Trial(example, fake)
    small = [(*shape[:2], side, side) for side in sides if len(shape) == 4 and side < min(shape[2:])]
    for size in (*small, shape):
        yield Trial(fill(size, dtype=dtype, device=own))


@contextmanager
def swapped(module: nn.Module, values: Mapping[int, Tensor]) -> Iterator[None]:
    """Let ``module`` use other tensors in place of parameters and buffers, by their id, under every name they have."""
    held: list[dict[str, Any]] = [each for part in module.modules() for each in (part._parameters, part._buffers)]
    places = [(each, name, tensor) for each in held for name, tensor in each.items() if id(tensor) in values]
    for each, name, tensor in places:
        each[name] = values[id(tensor)]
    try:
        yield
    finally:
        for each, name, tensor in places:
            each[name] = tensor


def replacements(module: nn.Module, replace: Callable[[Tensor], Tensor]) -> dict[int, Tensor]:
    """Return by id what ``replace`` makes of each parameter and buffer of ``module``."""
    state = {id(tensor): tensor for tensor in state_of(module).values()}
    return {key: replace(tensor) for key, tensor in state.items()}


def state_of(module: nn.Module) -> dict[str, Tensor]:
    """Return parameters, then buffers, by every name that they have in ``module``."""
    named = (module.named_parameters, module.named_buffers)
    return {name: tensor for tensors in named for name, tensor in tensors(remove_duplicate=False)}


def empty_like(tensor: Tensor, device: torch.device, fake: FakeTensorMode | None = None) -> Tensor:
    """Return a tensor or parameter on ``device`` laid out as ``tensor``, with any values.

    Args:
        fake: mode, not entered, in which it has no data; made as the mode itself makes values of shapes that it knows,
            which takes a tenth of the time of an operation in it.
    """
    trained, where = isinstance(tensor, nn.Parameter), device if fake is None else torch.device("meta")
    empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=where)
    if fake is not None:
        return FakeTensor(fake, empty, device, requires_grad=trained and tensor.requires_grad, _is_param=trained)
    return nn.Parameter(empty, requires_grad=tensor.requires_grad) if trained else empty


def copy_of(tensor: Tensor) -> Tensor:
    """Return a copy of a parameter or buffer, with its values."""
    copy = tensor.detach().clone()
    return nn.Parameter(copy, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else copy


@contextmanager
def without_data() -> Iterator[FakeTensorMode]:
    """Run operations on shapes and types alone. Autocast keeps no cast of a parameter meanwhile: the pass that this is
    part of would take it for its own, and its gradient would have no data."""
    caching = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        with ONE_AT_A_TIME, FakeTensorMode(allow_non_fake_inputs=True) as fake, torch.no_grad():
            yield fake
    finally:
        torch.set_autocast_cache_enabled(caching)


def run_without_data(
    model: nn.Module,
    shape: tuple[int, ...],
    layout: torch.memory_format = torch.contiguous_format,
    watch: AbstractContextManager[Any] | None = None,
) -> None:
    """Run ``model`` on the CPU on tiles that have no data, and leave it as it was.

    Args:
        shape: (n, c, h, w) of a microbatch.
        layout: of tiles and of parameters of four dimensions.
        watch: context of the forward pass.

    Raises:
        Exception: whatever the model raises; a model that looks at its data cannot run so.
    """

    def laid_out(tensor: Tensor) -> Tensor:
        return tensor.to(memory_format=layout) if tensor.dim() == 4 else tensor

    cpu = torch.device("cpu")
    dtype = next((p.dtype for p in model.parameters()), torch.float32).to_real()
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with preserve_module_state(model), torch.random.fork_rng(devices=[]), fake, watch or nullcontext():
        values = replacements(model, lambda tensor: laid_out(empty_like(tensor, cpu)))
        with swapped(model, values):
            model(laid_out(torch.empty(shape, dtype=dtype)))


def refuse_tile_size(model: nn.Module, name: str, shape: tuple[int, ...]) -> None:
    """Refuse tiles on which ``model`` does not run.

    Args:
        name: ``--model``.
        shape: (n, c, h, w) of a microbatch.

    Raises:
        ValueError: which size it is made for, as far as it says so, and what to do.
    """
    with preserve_module_state(model):
        model.eval()
        try:
            run_without_data(model, shape)
        except NEEDS_DATA:
            return
        except Exception as fault:
            own = own_side(model)
            without_data = any(parameter.is_meta for parameter in model.parameters())
            if own is None and not without_data and (max(shape[2:]) > LARGEST_RUN or _runs(model, shape)):
                return
            use = f"it is made for {own} px: use --tile {own}, or" if own else "use another --tile, or"
            raise ValueError(
                f"model {name} does not run on tiles of {shape[3]} x {shape[2]} px: "
                f"{' '.join(str(fault).split())[:300]}; {use} a model that takes any size, such as resnet50 or "
                "timm:convnext_tiny"
            ) from fault


def own_side(model: nn.Module) -> int | None:
    """Return the input side, px, of a model of timm, torchvision or transformers; None where it has none."""
    for part in model.modules():
        config = getattr(part, "pretrained_cfg", None)
        sizes: list[Any] = [config.get("input_size")] if isinstance(config, dict) else []
        sizes += [getattr(part, "image_size", None), getattr(getattr(part, "config", None), "image_size", None)]
        for size in sizes:
            side = size[-1] if isinstance(size, list | tuple) and size else size
            if isinstance(side, int):
                return side
    return None


def _runs(model: nn.Module, shape: tuple[int, ...]) -> bool:
    parameter = next(model.parameters(), torch.empty(()))
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            model(torch.zeros((1, *shape[1:]), dtype=parameter.dtype.to_real(), device=parameter.device))
    except Exception:  # any code of a model that is not ours
        return False
    return True


@contextmanager
def exclusively(communicator: Communicator) -> Iterator[None]:
    """Let ranks that may be threads of one process run a block one after the other, and go on when all have; every rank
    calls it. No rank draws weights before, or computes after, while another traces."""
    communicator.barrier()
    with ONE_AT_A_TIME:
        yield
    communicator.barrier()


@contextmanager
def preserve_module_state(module: nn.Module, *, parameters: bool = False) -> Iterator[None]:
    """Put back, at the end, attributes, hooks, modes, submodules and buffers of ``module`` and all its submodules, the
    contents of containers and the values of tensors that attributes hold. Every run to learn about a model is in it.

    Args:
        parameters: their values, too; not needed where a run has no data, or is given copies of them.
    """
    attributes = [(vars(submodule), dict(vars(submodule))) for submodule in module.modules()]
    contents: dict[int, tuple[Any, Any]] = {}
    tensors: dict[int, tuple[Tensor, Tensor, int, bool, Tensor | None]] = {}
    for _, values in attributes:
        for value in values.values():
            if type(value) not in PLAIN:
                _save(value, contents, tensors, parameters)
    try:
        yield
    finally:
        for held, values in attributes:
            held.clear()
            held.update(values)
        for container, content in contents.values():
            if container or content:
                container.clear()
                (container.update if isinstance(container, (dict, set)) else container.extend)(content)
        for tensor, memory, version, trained, copy in tensors.values():
            if not _same_memory(tensor, memory):
                tensor.data = memory
            if tensor.is_leaf and tensor.requires_grad != trained:
                tensor.requires_grad_(trained)
            if copy is not None and (tensor._version != version or not _same_values(tensor, copy)):
                with torch.no_grad():
                    tensor.copy_(copy)


def _save(value: Any, contents: dict[int, tuple[Any, Any]], tensors: dict[int, Any], parameters: bool) -> None:
    if type(value) in CONTAINERS:
        if id(value) not in contents:
            contents[id(value)] = value, value.copy()
            for element in value.values() if isinstance(value, dict) else value:
                _save(element, contents, tensors, parameters)
    elif isinstance(value, Tensor):
        if id(value) not in tensors and not nn.parameter.is_lazy(value) and value.layout is torch.strided:
            copy = value.detach().clone() if parameters or not isinstance(value, nn.Parameter) else None
            tensors[id(value)] = value, value.detach(), value._version, value.requires_grad, copy
    elif isinstance(value, tuple):
        for element in value:
            _save(element, contents, tensors, parameters)


def _same_memory(tensor: Tensor, memory: Tensor) -> bool:
    same = tensor.shape == memory.shape and tensor.stride() == memory.stride()
    return same and tensor.untyped_storage()._cdata == memory.untyped_storage()._cdata


def _same_values(tensor: Tensor, copy: Tensor) -> bool:
    """Return False where values are known to differ; ``x.data.mul_(2)`` leaves the version of ``x``."""
    return isinstance(tensor, FakeTensor) or tensor.is_meta or torch.equal(tensor, copy)
