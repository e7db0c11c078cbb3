"""Bytes that the steps of a region save for backward and work with, recorded by running each step once without data.

Takes a module and its region; returns the bytes of each step by px, and the operations that it computes. Tensors are on
the meta device: nothing is computed, and nothing of the module changes.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_map_only

from parallel.graph.layers import Op
from parallel.offload.live_bytes import LiveBytes
from parallel.space.cuts import Span
from parallel.space.rule import Step, Window
from parallel.streaming.operation import Arguments, module_of, parameters_of
from parallel.streaming.part_run import resolver, run_plain
from parallel.streaming.patch import Patch, cut_of, cut_value
from parallel.streaming.region import Region
from parallel.trace.op_recorder import OpRecorder, bytes_of, storage_of, tensors_of
from parallel.trace.without_data import empty_like, replacements, state_of, swapped

META = torch.device("meta")


@dataclass(frozen=True, slots=True)
class StepRecord:
    """Measured fields of one ``Step``.

    Attributes:
        kept, work: bytes for each pixel of the step's value, of one tile.
        ops: operations of the forward pass, on the side that was recorded.
    """

    saves: tuple[str, ...]
    kept: float
    work: float
    param_bytes: int
    aliases: str
    passes_grad_through: bool
    pads_by_copy: bool
    ops: tuple[Op, ...]


def record(module: nn.Module, region: Region) -> dict[str, StepRecord]:
    """Return the records of the steps that take maps, by name.

    Args:
        module: has the modules and parameters, in the mode that they run in.
    """
    recording = _Recording(module, region)
    with swapped(module, replacements(module, lambda tensor: empty_like(tensor, META))):
        recording.run()
    return recording.records


def with_record(steps: Sequence[Step], records: Mapping[str, StepRecord], tiles: int) -> tuple[Step, ...]:
    """Return ``steps``, of a region on tiles of any size, with what was recorded on some.

    Args:
        tiles: of the microbatch.
    """
    return tuple(_recorded(step, records[step.name], tiles) if step.name in records else step for step in steps)


def _recorded(step: Step, known: StepRecord, tiles: int) -> Step:
    px = tiles * math.prod(step.sides)
    return replace(
        step,
        saves=known.saves,
        kept_bytes=round(known.kept * px),
        work_bytes=round(known.work * px),
        param_bytes=known.param_bytes,
        aliases=known.aliases,
        passes_grad_through=known.passes_grad_through,
        pads_by_copy=known.pads_by_copy,
    )


class _Recording:
    """Run of the steps of a region, one by one and each kind once."""

    def __init__(self, module: nn.Module, region: Region) -> None:
        self.module = module
        self._region = replace(region, forms={name: (*form[:2], META) for name, form in region.forms.items()})

        def entering(names: Sequence[str]) -> dict[str, Any]:
            return {n: torch.empty(region.forms[n][0], dtype=region.forms[n][1], device=META) for n in names}

        self._values = entering(region.inputs)
        self.global_steps = {step.name: step for step in region.steps if step.global_op}
        self._known = _Known(self)
        self._known.update(entering(region.given))
        self.records: dict[str, StepRecord] = {}
        self._alike: dict[Hashable, Step] = {}

    def run(self) -> None:
        state = {storage_of(tensor) for tensor in state_of(self.module).values()}
        for step in self._region.steps:
            if step.global_op:
                continue
            key = self._key(step)
            if key is not None and (same := self._alike.get(key)) is not None:
                self._as_before(step, same)
                continue
            self._run(step, state)
            if key is not None:
                self._alike[key] = step

    def global_value(self, name: str) -> Any:
        """Return the value of a step without rows; one that takes no map may name a device."""
        value = run_plain(self.module, self._region, self.global_steps[name], self._known)
        return tree_map_only(Tensor, lambda leaf: leaf.to(META), value)

    def _key(self, step: Step) -> Hashable:
        """Return what is equal for steps that are recorded alike; None for a step like no other."""
        region, node = self._region, self._region.nodes[step.name]
        module, others = module_of(self.module, node), [self._form_of(step, name) for name in step.others]
        composite = module is not None and any(True for _ in module.children())
        if composite or not all(others) or not all(isinstance(self._values[name], Tensor) for name in step.maps):
            return None
        resolve = resolver(self.module, region, self._known)

        def written(argument: fx.Node) -> str:
            if argument.name in step.maps:
                return f"map {step.maps.index(argument.name)}"
            return f"value {form(resolve(argument))}"

        call: Hashable = node.target if module is None else (type(module), form(vars(module)))
        arguments = repr(fx.map_arg((node.args, node.kwargs), written))
        wants = tuple(name not in region.inputs or name in region.flows for name in step.maps)
        maps = tuple((form(self._values[n].detach()), region.sides[n], region.dims[n]) for n in step.maps)
        known = (step.name.removeprefix(node.name), step.rules, step.sides, step.sums, region.may_change(step))
        return call, arguments, maps, wants, tuple(others), known

    def _form_of(self, step: Step, name: str) -> Hashable:
        """Return a key of values without rows that are recorded alike; None for one recorded with ``step``."""
        region, of_node = self._region, self._region.nodes[step.name].name
        if name not in self.global_steps or self._known.made(name):
            return form(self._known[name]), name in region.fixed
        if region.nodes[name].name != of_node:
            return None
        made_of = tuple(self._form_of(step, other) for other in self.global_steps[name].others)
        return (name.removeprefix(of_node), made_of, name in region.fixed) if all(made_of) else None

    def _as_before(self, step: Step, same: Step) -> None:
        """Take for ``step`` what was recorded of one that is alike."""
        record = self.records[same.name]
        names = dict(zip((*same.maps, same.name), (*step.maps, step.name), strict=True))
        saves = tuple(names[name] for name in record.saves)
        self.records[step.name] = replace(record, saves=saves, aliases=names.get(record.aliases, ""))
        values = self._known if step.sums else self._values
        values[step.name] = values[same.name]

    def _run(self, step: Step, state: set[StorageWeakRef]) -> None:
        region, operation = self._region, self._region.operations[step.name]
        leaves = {n: _leaf(self._around(step, n), n not in region.inputs or n in region.flows) for n in step.maps}
        others = {n: _leaf(self._known[n], True) for n in step.others if n not in region.fixed}
        known = collections.ChainMap(others, self._known)
        recorder = OpRecorder(state)
        with torch.enable_grad():
            # Copies are no leaves, so that they may be changed in place.
            taken = {name: tree_map_only(Tensor, Tensor.clone, value) for name, value in leaves.items()}
            patches = {name: self._patch(step, name, value) for name, value in taken.items()}
            resolve = resolver(self.module, region, known)
            given = Arguments(
                self.module, region.nodes[step.name], patches, resolve, self._region.may_change(step), known
            )
            with recorder, saved_tensors_hooks(recorder.pack, lambda tensor: tensor):
                value = operation.compute(given)
        ops = tuple(recorder.ops)
        takes = {recorder.numbered(tensor): name for name, v in taken.items() for tensor in tensors_of(v)}
        gives = dict.fromkeys(map(recorder.numbered, tensors_of(value)), step.name)
        names, saved = {**takes, **gives}, recorder.saved.items()
        px = math.prod(step.sides) * region.forms[region.inputs[0]][0][0]
        params = self._trained(step)
        work, passes_grad_through = _backward_work(value, list(leaves.values()), [*others.values(), *params])
        self.records[step.name] = StepRecord(
            tuple(dict.fromkeys(names[storage] for storage in saved if storage in names)),
            sum(storage[1] for storage in saved if storage not in names) / px,
            work / px,
            sum(map(bytes_of, params)),
            next((takes[storage] for storage in gives if storage in takes), ""),
            passes_grad_through,
            any(isinstance(rule, Window) and rule.reach > 1 for rule in step.rules),
            ops,
        )
        (self._known if step.sums else self._values)[step.name] = value

    def _around(self, step: Step, name: str) -> Any:
        """Return a map with all rows that the step needs: a box in the middle is not padded."""
        value, dims = self._values[name], self._region.dims[name]
        if not isinstance(value, Tensor) or not any(isinstance(r, Window) and r.reach > 1 for r in step.rules):
            return value
        shape = list(value.shape)
        for axis, dim in enumerate(dims):
            shape[dim] = step.rules[axis].need(Span(0, step.sides[axis]), self._region.sides[name][axis]).size
        return value.new_empty(shape)

    def _patch(self, step: Step, name: str, value: Any) -> Patch:
        """Return all of a map, as a box that is the tile takes it."""
        sides, dims = self._region.sides[name], self._region.dims[name]
        box = (Span(0, step.sides[0]), Span(0, step.sides[1]))
        need = (step.rules[0].need(box[0], sides[0]), step.rules[1].need(box[1], sides[1]))
        if isinstance(value, Tensor) and all(value.shape[dims[axis]] == need[axis].size for axis in (0, 1)):
            return Patch(value, need, need, box, sides, dims)
        have = (need[0].within(sides[0]), need[1].within(sides[1]))
        value = cut_value(value, dims, cut_of(have, (Span(0, sides[0]), Span(0, sides[1]))))
        return Patch(value, need, have, box, sides, dims)

    def _trained(self, step: Step) -> list[nn.Parameter]:
        """Return the parameters that get a gradient from the step."""
        if step.name not in self._region.operations or "~" in step.name:
            return []
        return [p for p in parameters_of(self.module, (self._region.nodes[step.name],)) if p.requires_grad]


class _Known(dict[str, Any]):
    """Values without rows, computed at their first use."""

    def __init__(self, recording: _Recording) -> None:
        super().__init__()
        self._recording = recording

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or name in self._recording.global_steps

    def made(self, name: str) -> bool:
        """Return whether the value was computed."""
        return super().__contains__(name)

    def __missing__(self, name: str) -> Any:
        self[name] = self._recording.global_value(name)
        return self[name]


def _backward_work(value: Any, leaves: Sequence[Any], others: Sequence[Tensor]) -> tuple[int, bool]:
    """Run the backward pass; return (bytes of work space, whether the gradient is passed on as it is)."""
    outputs, used = ([tensor for tensor in tensors_of(each) if tensor.requires_grad] for each in (value, leaves))
    if not outputs or not (used or others):
        return 0, False
    pulled = [torch.empty_like(output) for output in outputs]
    with LiveBytes(without_data=True) as live:
        gradients = torch.autograd.grad(outputs, [*used, *others], pulled, allow_unused=True)
    given = {storage_of(tensor) for tensor in pulled}
    fresh = {storage_of(g): g.untyped_storage().nbytes() for g in gradients if g is not None}
    of_maps = [storage_of(g) for g in gradients[: len(used)] if g is not None]
    made = sum(size for storage, size in fresh.items() if storage not in given)
    return max(0, live.peak_bytes - made), bool(of_maps) and all(storage in given for storage in of_maps)


def _leaf(value: Any, wants: bool) -> Any:
    return tree_map_only(Tensor, lambda tensor: tensor.detach().requires_grad_(wants), value)


def form(value: Any) -> Hashable:
    """Return all that a run without data can see of ``value``."""
    if isinstance(value, Tensor):
        return tuple(value.shape), value.stride(), value.dtype, value.requires_grad, isinstance(value, nn.Parameter)
    if isinstance(value, (tuple, list)):
        return tuple(map(form, value))
    if isinstance(value, dict):
        return tuple((name, form(each)) for name, each in value.items())
    return repr(value)
