"""A search for state that a model's forward pass updates in training, other than the running statistics of norms.

Takes a model and the shape of a microbatch; gives the state by path: spectral norm's vectors, a user's running averages
and counters, codebooks kept as parameters without gradient, scales taken from the first microbatch, and tensors and
numbers in plain attributes. Such state sees every microbatch once and in order, or it is not the plain step's. Also
tells which of those layers a model's own ``torch.utils.checkpoint`` computes twice.
"""

from __future__ import annotations

import contextlib
import functools
from collections import deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.batchnorm import _NormBase
from torch.utils import checkpoint
from torch.utils._pytree import tree_leaves

from parallel.graph.layers import Op
from parallel.trace.left_as_it_was import left_as_it_was
from parallel.trace.op_recorder import OpRecorder, storage_of
from parallel.trace.without_data import state_of, swapped, trials

CHECKPOINT = "_checkpoint_without_reentrant_generator"
"""What torch.utils.checkpoint puts around a part of a model, begins with this; the end depends on torch's version."""

ATTRIBUTE, TRAINED, INITIALIZED = "attribute", "trained parameter", "trained parameter set from data"
"""Kinds of state that is no buffer; the first microbatch alone sets the last one."""

OF_TORCH = frozenset(vars(nn.Module()))
"""Attributes that torch gives every module."""

DEPTH = 3
"""Containers within containers in which state is looked for."""


@dataclass(frozen=True, slots=True)
class Updated:
    """State that forward passes update.

    Attributes:
        owner: class of its module.
        kind: what it is registered as.
    """

    owner: str
    kind: str = "buffer"


def updated_buffers(module: nn.Module, shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, Updated]:
    """Return the state, by path, that ``module`` updates in training mode: buffers, parameters, and tensors and numbers
    in attributes. The module and the generators stay as they are.

    What the first of two passes sets without looking at the tiles, and the second leaves alone, is a cache, and none of
    it.

    Args:
        shape: (n, c, h, w) of a microbatch.
    """
    running = {f"{path}.{name}" for path, layer in _tracking(module) for name, _ in layer.named_buffers(recurse=False)}
    watched = _Watched(module, state_of(module).keys() - {name.lstrip(".") for name in running})
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


def _run(module: nn.Module, watched: _Watched | _Checkpointed, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Run ``watched`` on what it can be run on; on nothing where it takes no such tiles, as training will say."""
    meta = any(tensor.is_meta for tensor in state_of(module).values())
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        for trial in trials(module, shape, dtype, device=torch.device("cpu")):
            if meta and trial.fake is None:
                return
            # looks at its data, or takes no such tiles: the next one
            with contextlib.suppress(Exception), left_as_it_was(module):
                with swapped(module, trial.values(module)), trial.mode, watched.recorder:
                    watched.run(trial.example)
                return


class _Flow(OpRecorder):  # type: ignore[no-untyped-call]
    """A record of which memory a pass reads and writes, and which holds what was computed from the tiles.

    Attributes:
        read: storages that were read.
        of_tiles: storages with what was computed from the tiles, in this pass and those before.
    """

    def __init__(self) -> None:
        self.of_tiles: set[StorageWeakRef] = set()
        super().__init__(set())

    def begin(self) -> None:
        super().begin()
        self.read: set[StorageWeakRef] = set()

    def _op(self, func: Any, name: str, arguments: dict[str, Any], value: Any, flops: int) -> Op:
        given = _storages(arguments)
        self.read |= given
        if given & self.of_tiles and not name.startswith("new_") and not name.endswith("_like"):
            changed = [arguments.get(a.name) for a in func._schema.arguments if a.alias_info and a.alias_info.is_write]
            self.of_tiles |= _storages((value, changed))
        return super()._op(func, name, arguments, value, flops)


def _storages(values: Any) -> set[StorageWeakRef]:
    return {storage_of(leaf) for leaf in tree_leaves(values) if isinstance(leaf, Tensor)}


@dataclass(frozen=True)
class _Pass:
    """One forward pass.

    Attributes:
        held: what modules hold after it, by name, each with its memory.
        read, written: storages.
    """

    held: dict[str, tuple[Any, set[StorageWeakRef]]]
    read: set[StorageWeakRef]
    written: set[StorageWeakRef]

    def changed(self, name: str, before: _Pass) -> bool:
        """Return whether this pass changed what is held by ``name``, or put something else there."""
        value, memory = before.held.get(name, (None, set()))
        now, memory_now = self.held.get(name, (value, memory))
        if isinstance(value, Tensor) or isinstance(now, Tensor):
            return now is not value or memory_now != memory or bool(memory & self.written)
        return bool(now != value and now == now)


class _Watched:
    """A model run twice, and the state that its passes update."""

    def __init__(self, model: nn.Module, names: Collection[str]) -> None:
        self.model = model
        self.recorder = _Flow()
        self.updated: dict[str, Updated] = {}
        self._names = sorted(names)

    def run(self, example: Tensor) -> None:
        self.recorder.of_tiles.add(storage_of(example))
        start, first, second = self._pass(None), self._pass(example), self._pass(example)
        kinds = {name: self._kind(name) for name in first.held}
        decided = {
            name
            for name, (_, memory) in first.held.items()
            if memory & self.recorder.of_tiles and first.changed(name, start)
            if kinds[name].kind != ATTRIBUTE or (memory & second.read and not second.changed(name, first))
        }
        found = set(decided)
        for name, (value, memory) in first.held.items():
            kind = kinds[name].kind
            if kind != ATTRIBUTE or not isinstance(value, Tensor):
                # What the first microbatch decides comes with what says that it is decided.
                again = second.changed(name, first) or (decided and first.changed(name, start))
                found |= {name} if again and kind != TRAINED else set()
            elif memory & second.written or (memory & second.read and second.changed(name, first)):
                found.add(name)
        for name in found:
            if kinds[name].kind == TRAINED and not second.changed(name, first):
                kinds[name] = Updated(kinds[name].owner, INITIALIZED)
        self.updated = {name.replace(":", ".").lstrip("."): kinds[name] for name in first.held if name in found}

    def _pass(self, example: Tensor | None) -> _Pass:
        self.recorder.begin()
        if example is not None:
            self.model(example)
        held = {name: self._registered(name) for name in self._names} | attributes_of(self.model)
        memory = {name: (value, _storages(value)) for name, value in held.items()}
        return _Pass(memory, self.recorder.read, self.recorder.written)

    def _registered(self, name: str) -> Tensor | None:
        path, _, last = name.rpartition(".")
        owner = self.model.get_submodule(path)
        return owner._buffers[last] if last in owner._buffers else owner._parameters.get(last)

    def _kind(self, name: str) -> Updated:
        path, _, last = name.partition(":") if ":" in name else name.rpartition(".")
        owner = self.model.get_submodule(path)
        parameter = owner._parameters.get(last)
        if ":" in name:
            kind = ATTRIBUTE
        elif parameter is not None:
            kind = TRAINED if parameter.requires_grad else "parameter without gradient"
        else:
            kind = "buffer"
        return Updated(type(owner).__name__, kind)


def attributes_of(module: nn.Module) -> dict[str, Any]:
    """Return the tensors, numbers and texts in plain attributes of all submodules, by path:attribute.index."""
    held: dict[str, Any] = {}

    def add(name: str, value: Any, depth: int = 0) -> None:
        if isinstance(value, Tensor | int | float | str):
            held[name] = value
        elif isinstance(value, list | tuple | deque | dict) and depth < DEPTH:
            for key, element in value.items() if isinstance(value, dict) else enumerate(value):
                add(f"{name}.{key}", element, depth + 1)

    for path, submodule in module.named_modules():
        for name in vars(submodule).keys() - OF_TORCH:
            add(f"{path}:{name}", vars(submodule)[name])
    return held


class _Checkpointed:
    """A model run once, and the path of the first of its layers with running statistics that a checkpoint will run
    again."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.paths = {id(layer): path for path, layer in _tracking(model)}
        self.first = ""
        self._depth = 0

    def run(self, example: Tensor) -> None:
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
