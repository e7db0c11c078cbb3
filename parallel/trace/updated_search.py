"""A search for buffers that a model's forward pass updates in training, other than the running statistics of norms.

Takes a model and the shape of a microbatch; gives the buffers by path: spectral norm's vectors, a user's running
averages and counters, and codebooks kept as parameters without gradient. Such a buffer sees every microbatch once and
in order, or it is not the plain step's. Also tells which of those layers a model's own ``torch.utils.checkpoint``
computes twice.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.modules.batchnorm import _NormBase
from torch.utils import checkpoint

from parallel.trace.fake_run import empty_like, once_each
from parallel.trace.op_recorder import OpRecorder, storage_of

CHECKPOINT = "_checkpoint_without_reentrant_generator"
"""What torch.utils.checkpoint puts around a part of a model, begins with this; the end depends on torch's version."""

SIDES = (64, 128, 224, 256)
"""px of tiles on which a model that looks at its data is tried before those of the run, which may be large."""


@dataclass(frozen=True, slots=True)
class Updated:
    """A buffer that forward passes update.

    Attributes:
        owner: class of its module.
        assigned: another tensor takes its place; else its values are changed.
        kind: what it is registered as.
    """

    owner: str
    assigned: bool
    kind: str = "buffer"


def updated_buffers(module: nn.Module, shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, Updated]:
    """Return the buffers, by path, that ``module`` updates in training mode. Its parameters, buffers and the generators
    stay as they are; whoever calls this puts back what forward assigns.

    What the first of two passes sets and the second leaves alone is a cache, and none of them.

    Args:
        shape: (n, c, h, w) of a microbatch.
    """
    running = {f"{path}.{name}" for path, layer in _tracking(module) for name, _ in layer.named_buffers(recurse=False)}
    buffers = {name for name, _ in module.named_buffers(remove_duplicate=False)}
    buffers -= {name.lstrip(".") for name in running}
    buffers |= {name for name, p in module.named_parameters(remove_duplicate=False) if not p.requires_grad}
    if not buffers:
        return {}
    watched = _Watched(module, buffers)
    _run(module, watched, shape, dtype)
    return watched.updated


def checkpointed_norm(module: nn.Module, shape: tuple[int, ...], dtype: torch.dtype) -> str:
    """Return the path of the first layer with running statistics that runs inside of ``torch.utils.checkpoint``; "" if
    none does.

    Torch computes such a layer again in the backward pass, and updates its statistics once more.

    Args:
        shape: (n, c, h, w) of a microbatch.
    """
    watched = _Checkpointed(module)
    if watched.paths:
        _run(module, watched, shape, dtype)
    return watched.first


def _tracking(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    tracking = set(tracking_layers(module))
    return ((path, layer) for path, layer in module.named_modules(remove_duplicate=False) if layer in tracking)


def _attempts(module: nn.Module, shape: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], FakeTensorMode | None]]:
    yield shape, FakeTensorMode(allow_non_fake_inputs=True)
    if not any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers())):
        for side in SIDES:
            if side < min(shape[2:], default=0):
                yield (*shape[:2], side, side), None
        yield shape, None


def _run(module: nn.Module, watched: _Watched | _Checkpointed, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Run ``watched`` on what it can be run on; on nothing where it takes no such tiles, as training will say."""
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        for sizes, fake in _attempts(module, shape):
            with contextlib.suppress(Exception):  # looks at its data, or takes no such tiles: the next one
                _run_once(module, watched, sizes, dtype, fake)
                return


def _run_once(
    module: nn.Module,
    watched: _Watched | _Checkpointed,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    fake: FakeTensorMode | None,
) -> None:
    """Run ``watched`` on copies of the buffers, without data where ``fake`` is given."""
    state: dict[str, Tensor] = {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }
    device = torch.device("cpu") if fake else next((t.device for t in state.values()), torch.device("cpu"))
    with fake or contextlib.nullcontext():
        replaced = once_each(
            state, lambda t: empty_like(t, device) if fake else t if t.requires_grad else t.detach().clone()
        )
        example = torch.zeros(shape, dtype=dtype, device=device)
    mode: AbstractContextManager[Any] = fake or contextlib.nullcontext()
    with mode, watched.recorder:
        named = {f"model.{name}": tensor for name, tensor in replaced.items()}
        torch.func.functional_call(watched, named, (example,), tie_weights=False)


class _Watched(nn.Module):
    """A model run twice, and what the second pass does to buffers; a module so that ``functional_call`` swaps and
    restores what it uses."""

    def __init__(self, model: nn.Module, buffers: set[str]) -> None:
        super().__init__()
        self.model = model
        self.recorder = OpRecorder(set())
        self.updated: dict[str, Updated] = {}
        self._names = sorted(buffers)

    def forward(self, example: Tensor) -> None:
        self.model(example)
        before = {name: self._now(name) for name in self._names}
        self.recorder.begin()
        self.model(example)
        for name, tensor in before.items():
            assigned = self._now(name) is not tensor
            if assigned or (tensor is not None and storage_of(tensor) in self.recorder.written):
                owner = self.model.get_submodule(name.rpartition(".")[0])
                kind = "buffer" if name.rpartition(".")[2] in owner._buffers else "parameter without gradient"
                self.updated[name] = Updated(type(owner).__name__, assigned, kind)

    def _now(self, name: str) -> Tensor | None:
        path, _, attribute = name.rpartition(".")
        owner = self.model.get_submodule(path)
        return owner._buffers[attribute] if attribute in owner._buffers else owner._parameters.get(attribute)


class _Checkpointed(nn.Module):
    """A model run once, and the path of the first of its layers with running statistics that a checkpoint will run
    again."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.paths = {id(layer): path for path, layer in _tracking(model)}
        self.first = ""
        self._depth = 0

    def forward(self, example: Tensor) -> None:
        self.model(example)

    @property
    @contextlib.contextmanager
    def recorder(self) -> Iterator[None]:
        generators = {name: make for name, make in vars(checkpoint).items() if name.startswith(CHECKPOINT)}
        reentrant = vars(checkpoint.CheckpointFunction)["forward"]
        layers = [layer for layer in self.model.modules() if id(layer) in self.paths]
        hooks = [layer.register_forward_pre_hook(self._note) for layer in layers]
        vars(checkpoint).update({name: functools.partial(self._within, make) for name, make in generators.items()})
        inside = functools.partial(self._inside, checkpoint.CheckpointFunction.forward)
        setattr(checkpoint.CheckpointFunction, "forward", staticmethod(inside))  # noqa: B010  # no method to mypy
        try:
            yield
        finally:
            setattr(checkpoint.CheckpointFunction, "forward", reentrant)  # noqa: B010
            vars(checkpoint).update(generators)
            for hook in hooks:
                hook.remove()

    def _note(self, layer: nn.Module, _: Any) -> None:
        if self._depth and layer.training:
            self.first = self.first or self.paths[id(layer)]

    def _within(self, make: Callable[..., Iterator[None]], *args: Any, **kwargs: Any) -> Iterator[None]:
        self._depth += 1
        try:
            yield from make(*args, **kwargs)
        finally:
            self._depth -= 1

    def _inside(self, forward: Callable[..., Any], *args: Any) -> Any:
        self._depth += 1
        try:
            return forward(*args)
        finally:
            self._depth -= 1


def tracking_layers(module: nn.Module) -> list[_NormBase]:
    """Return the layers of ``module`` that keep running statistics."""
    return [layer for layer in module.modules() if isinstance(layer, _NormBase) and layer.running_mean is not None]
