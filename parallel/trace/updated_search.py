"""A search for state that forward passes update in training, other than the running statistics of norms.

Spectral norm's vectors, a user's running averages and counters, codebooks kept as parameters without gradient, scales
taken from the first microbatch, and tensors and numbers in plain attributes. Such state sees every microbatch once and
in order, or it is not the plain step's: strategies under which it would not are refused.
"""

from __future__ import annotations

import contextlib
import sys
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.batchnorm import _NormBase
from torch.utils import checkpoint

from parallel.comm.communicator import Communicator
from parallel.graph.layers import Op
from parallel.graph.partition import Partition
from parallel.memory.policy import ActivationPolicy
from parallel.schedule.action import Action, Kind
from parallel.schedule.mesh import Mesh
from parallel.trace.op_recorder import OpRecorder, storage_of, tensors_of, written_by
from parallel.trace.python_random import preserve_python_state
from parallel.trace.without_data import exclusively, preserve_module_state, state_of, swapped, trials

if TYPE_CHECKING:
    from parallel.trace.trace import Traced

CHECKPOINTS = ("checkpoint", "_checkpoint_impl", "CheckpointFunction.forward")
"""Functions of ``torch.utils.checkpoint`` that call a part of a model."""

ATTRIBUTE, TRAINED, INITIALIZED = "attribute", "trained parameter", "trained parameter set from data"
"""Kinds of state that is no buffer; the first microbatch alone sets the last one."""

OF_TORCH, DEPTH = frozenset(vars(nn.Module())), 3
"""Attributes that torch gives every module; depth of containers in which state is looked for."""


@dataclass(frozen=True, slots=True)
class Updated:
    """State that forward passes update: the class of its module, and what it is registered as."""

    owner: str
    kind: str = "buffer"


def updated_buffers(module: nn.Module, shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, Updated]:
    """Return the state, by path, that ``module`` updates in training mode: buffers, parameters, and tensors and numbers
    in attributes. The module and the generators stay as they are.

    What the first of two passes sets without looking at the tiles, and the second leaves alone, is a cache, and none of
    it. State that only a later pass updates is not found where nothing that the model holds says so, as a counter among
    a module's globals.

    Args:
        shape: (n, c, h, w) of a microbatch.
    """
    statistics = ("running_mean", "running_var", "num_batches_tracked")
    running = {id(getattr(layer, name, None)) for layer in tracking_layers(module) for name in statistics}
    names = sorted(name for name, tensor in state_of(module).items() if id(tensor) not in running)
    recorder, updated = _Flow(), dict[str, Updated]()

    def run(tiles: Tensor) -> None:
        recorder.of_tiles.add(storage_of(tiles))
        start, first = (_pass(module, names, recorder, each) for each in (None, tiles))
        if any(first.changed(name, start) for name in first.held):  # else a second pass would not, either
            second = _pass(module, names, recorder, tiles)
            updated.update(_updated(module, recorder.of_tiles, start, first, second))

    _run(module, run, recorder, shape, dtype)
    return updated


def refuse_checkpointed(module: nn.Module, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Refuse a model whose own ``torch.utils.checkpoint`` runs layers with running statistics: torch computes such a
    layer again in the backward pass, and updates its statistics once more.

    Args:
        shape: (n, c, h, w) of a microbatch.

    Raises:
        ValueError: names the first such layer, and says what to do.
    """
    tracking = {*tracking_layers(module)}
    paths = {layer: path for path, layer in module.named_modules() if layer in tracking}
    found: list[str] = []

    def note(layer: nn.Module, _: Any) -> None:
        frame: FrameType | None = sys._getframe()
        while layer.training and frame is not None:
            code = frame.f_code
            if code.co_filename == checkpoint.__file__ and code.co_qualname in CHECKPOINTS:
                found.append(paths[layer])
            frame = frame.f_back

    def run(example: Tensor) -> None:
        for layer in paths:
            layer.register_forward_pre_hook(note)
        module(example)

    if paths:
        with preserve_module_state(module):
            module.train()
            _run(module, run, contextlib.nullcontext(), shape, dtype)
    if found:
        raise ValueError(
            f"{found[0]} keeps running statistics inside of the model's own torch.utils.checkpoint, which updates them "
            "a second time in the backward pass; what is split, recomputed or spread over ranks updates them once: "
            "switch the model's checkpointing off (timm: set_grad_checkpointing(False)) and use --recompute block, or "
            "one process with --recompute none"
        )


def _run(
    module: nn.Module,
    run: Callable[[Tensor], None],
    recorder: contextlib.AbstractContextManager[Any],
    shape: tuple[int, ...],
    dtype: torch.dtype,
) -> None:
    """Call ``run`` on tiles that ``module`` can be run on; not where it takes no such tiles, as training will say."""
    meta = any(tensor.is_meta for tensor in state_of(module).values())
    with torch.random.fork_rng(devices=[]), preserve_python_state(), torch.enable_grad():
        for trial in trials(module, shape, dtype, device=torch.device("cpu")):
            if meta and trial.fake is None:
                return
            # looks at its data, or takes no such tiles: the next one
            with contextlib.suppress(Exception), preserve_module_state(module):
                with swapped(module, trial.values(module)), trial.mode, recorder:
                    run(trial.example)
                return


class _Flow(OpRecorder):  # type: ignore[no-untyped-call]
    """Storages that a pass reads (``read``), and those computed from the tiles so far (``of_tiles``)."""

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
            self.of_tiles |= _storages((value, written_by(func, (), arguments)))
        return super()._op(func, name, arguments, value, flops)


def _storages(values: Any) -> set[StorageWeakRef]:
    return set(map(storage_of, tensors_of(values)))


@dataclass(frozen=True)
class _Pass:
    """State that modules hold after a forward pass, by name with its memory; the storages that it read and wrote."""

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


def _pass(module: nn.Module, names: Collection[str], recorder: _Flow, tiles: Tensor | None) -> _Pass:
    """Run ``module`` on ``tiles``, if any, and return what it holds afterwards; ``names`` are of its buffers."""
    recorder.begin()
    if tiles is not None:
        module(tiles)
    state = state_of(module)
    held = {name: state.get(name) for name in names} | attributes_of(module)
    return _Pass({name: (value, _storages(value)) for name, value in held.items()}, recorder.read, recorder.written)


def _updated(
    module: nn.Module, of_tiles: set[StorageWeakRef], start: _Pass, first: _Pass, second: _Pass
) -> dict[str, Updated]:
    """Return what the passes update; ``of_tiles`` holds what was computed from the tiles."""
    kinds = {name: _kind(module, name) for name in first.held}
    decided = {
        name
        for name, (_, memory) in first.held.items()
        if memory & of_tiles and first.changed(name, start)
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
    return {name.replace(":", ".").lstrip("."): kinds[name] for name in first.held if name in found}


def _kind(module: nn.Module, name: str) -> Updated:
    path, _, last = name.partition(":") if ":" in name else name.rpartition(".")
    owner = module.get_submodule(path)
    kind = ATTRIBUTE if ":" in name else "buffer"
    if kind != ATTRIBUTE and (parameter := owner._parameters.get(last)) is not None:
        kind = TRAINED if parameter.requires_grad else "parameter without gradient"
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


def tracking_layers(module: nn.Module) -> list[_NormBase]:
    """Return the layers of ``module`` that keep running statistics."""
    return [layer for layer in module.modules() if isinstance(layer, _NormBase) and layer.running_mean is not None]


EXACT = "single, or mp-basic, gpipe, 1f1b or interleaved with --stages as many as --ranks, without --recompute"
ALONE = "single without --recompute and --stream"
"""Strategies in which one copy of each stage sees all microbatches in order; in which the model itself runs."""


def refuse_updating_copies(
    module: nn.Module, shape: tuple[int, ...], communicator: Communicator, strategy: str
) -> None:
    """Refuse a model, traceable or not, that each rank would hold a copy of while its forward
    passes update state; every rank calls it.

    Raises:
        ValueError: names the first state, and says what to do; so do the other functions here.
    """
    if communicator.world == 1:
        return
    with exclusively(communicator), preserve_module_state(module):
        module.train()
        dtype = next(module.parameters()).dtype.to_real()
        refuse_checkpointed(module, shape, dtype)
        _refuse_copies(updated_buffers(module, shape, dtype), communicator.world, strategy)


def _refuse_copies(updated: Mapping[str, Updated], copies: int, strategy: str) -> None:
    if updated and copies > 1:
        raise ValueError(_fault(updated, strategy, f"{copies} copies would each do so for some of the microbatches"))


def copies_fault(updated: Mapping[str, Updated]) -> str:
    """Return why the model can neither be copied nor recomputed, for a planner; empty where it can."""
    return f"{_named(updated)}, copies for some of the microbatches and recomputation twice" if updated else ""


def refuse_schedule(
    traced: Traced,
    partition: Partition,
    schedule: Mapping[int, Collection[Action]],
    mesh: Mesh,
    policy: ActivationPolicy,
    strategy: str,
) -> None:
    """Refuse a schedule under which a stage with such state has several copies, is recomputed, or sees microbatches in
    another order than the plain step. Every rank finds the same."""
    for stage, updated in _by_stage(traced, partition).items():
        holders = mesh.teams_with(stage)
        _refuse_copies(updated, len(holders), strategy)
        actions = (a for a in schedule[holders[0]] if a.kind is Kind.FORWARD and a.stage == stage)
        seen = [action.microbatch for action in actions if action.microbatch is not None]
        if policy.segmented or policy.stagewise:
            reason = f"--recompute {policy.recompute} would do so in backward passes, too"
        elif weights := {name: state for name, state in updated.items() if state.kind == TRAINED}:
            updated, reason = weights, "several microbatches may be in flight"
        elif seen != sorted(seen):
            reason = f"stage {stage} would see the microbatches in the order {seen}"
        else:
            continue
        raise ValueError(_fault(updated, strategy, reason))


def _by_stage(traced: Traced, partition: Partition) -> dict[int, dict[str, Updated]]:
    """Return the buffers of each stage that has some; refuse one that no layer uses: nothing would update it."""
    by_stage: dict[int, dict[str, Updated]] = {}
    targets = {
        str(node.target): partition.stage_of(node.name)
        for node in traced.training.graph.nodes
        if node.op in ("call_module", "get_attr")
    }
    for name, buffer in traced.updated.items():
        stages = {stage for path, stage in targets.items() if f"{name}.".startswith(f"{path}.")}
        if not stages:
            raise ValueError(
                f"{name} of {buffer.owner}: a buffer that each forward pass of training updates, in a way that a graph "
                "of layers does not record: call its module, or update it in place, as copy_(...) does"
            )
        for stage in stages:
            by_stage.setdefault(stage, {})[name] = buffer
    return by_stage


def _fault(updated: Mapping[str, Updated], strategy: str, what: str) -> str:
    use = ALONE if any(state.kind in (ATTRIBUTE, TRAINED) for state in updated.values()) else EXACT
    return (
        f"{_named(updated)}; under --parallel {strategy} {what}, and it would not be what one process has: use "
        f"--parallel {use}, or leave the update out of forward"
    )


def refuse_attributes(updated: Mapping[str, Updated]) -> None:
    """Refuse a model that keeps state in plain attributes: it cannot be taken apart into layers."""
    if attributes := {name: state for name, state in updated.items() if state.kind == ATTRIBUTE}:
        raise ValueError(
            f"{_named(attributes)}, which a graph of layers does not record: use --parallel {ALONE}, or make it a "
            "buffer (register_buffer) that forward updates in place, as copy_(...) and add_(...) do"
        )


def _named(updated: Mapping[str, Updated]) -> str:
    name, buffer = next(iter(updated.items()))
    article = "an" if buffer.kind == ATTRIBUTE else "a"
    more = f" (and {len(updated) - 1} more)" if len(updated) > 1 else ""
    return f"{name} of {buffer.owner}{more} is {article} {buffer.kind} that each forward pass of training updates"
