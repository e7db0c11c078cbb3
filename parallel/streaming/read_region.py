"""Reads the region of a traced model that can be computed box by box: from what enters, to the first operation that
cannot.

Takes the nodes of a model or stage and the shapes that enter; gives the steps on paper, and how each is computed. What
follows the region is computed whole.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._pytree import tree_leaves

from parallel.space.rule import Step
from parallel.streaming.operation import DIMS, NotTileable, Operation, Reading
from parallel.streaming.read_node import (
    changes_in_place,
    has_tensors,
    in_same_memory,
    module_of,
    parameters_read,
    read_node,
)
from parallel.streaming.read_norm import ADVICE
from parallel.streaming.region import Forms, Region
from parallel.trace.stage_module import Boxes
from parallel.trace.without_data import without_data

MAKERS = ("new_empty", "new_zeros", "new_ones", "new_full")
"""Methods that take no more of a map than its type and device."""
NOTHING: Mapping[str, Any] = MappingProxyType({})


class NothingTileable(ValueError):
    """No layer can be computed box by box; says which is the first, and why.

    Attributes:
        ends_at: (layer, reason).
    """

    def __init__(self, layer: str, reason: str) -> None:
        super().__init__(f"--stream finds nothing to compute box by box: {layer} {reason}. Leave --stream out")
        self.ends_at = layer, reason


@dataclass
class _Found:
    steps: list[Step] = field(default_factory=list)
    operations: dict[str, Operation] = field(default_factory=dict)
    nodes: dict[str, fx.Node] = field(default_factory=dict)
    constants: dict[str, Any] = field(default_factory=dict)
    fixed: set[str] = field(default_factory=set)
    plain: set[str] = field(default_factory=set)
    barred: set[str] = field(default_factory=set)
    ends_at: tuple[str, str] | None = None


def read_region(
    model: nn.Module,
    nodes: Sequence[fx.Node],
    entering: Mapping[str, Tensor | Boxes],
    given: Mapping[str, Any] = NOTHING,
    refuse: Callable[[tuple[int, int]], str | None] = lambda sides: None,
    once: bool = False,
    updated: Collection[str] = (),
) -> Region:
    """Return the region of ``nodes``.

    Args:
        model: has the modules that they call, in the mode that they run in.
        nodes: in order.
        entering: what enters, images or maps (n, c, h, w), by name; only shapes and types matter.
        given: what else enters, by name.
        refuse: why maps of such (rows, columns) cannot be divided, which ends the region before the first of them.
        once: every node is computed once, in one pass over the model, as the members of a team do: it may count and
            draw, and a branch that ends leaves the others in the region.
        updated: paths of the buffers that forward passes update; the region ends where one is used.

    Raises:
        NothingTileable: it would be empty.
        ValueError: it would end at a norm, which is told with what to do; not with ``once``.
    """
    reading, found = Reading(model, once), _Found()
    with without_data() as fake:
        for name, value in entering.items():
            if isinstance(value, Tensor) and not once:
                reading.values[name] = fake.from_tensor(value.detach())
            elif once:
                layout = torch.channels_last if _channels_last(model) else torch.contiguous_format
                reading.values[name] = torch.empty(
                    value.shape, dtype=value.dtype, device=value.device, memory_format=layout
                )
            else:
                reading.values[name] = torch.empty(value.shape, dtype=value.dtype, device=value.device)
            reading.dims[name], reading.sides[name] = DIMS, tuple(value.shape[2:])  # type: ignore[assignment]
        for name, value in given.items():
            if isinstance(value, Tensor):
                reading.values[name] = fake.from_tensor(value.detach())
                found.plain.add(name)
                if not value.requires_grad:
                    found.fixed.add(name)
            elif has_tensors(value):
                found.barred.add(name)
            else:
                reading.values[name] = found.constants[name] = value
        for node in nodes:
            if node.op in ("output", "get_attr") or node.name in entering or node.name in given:
                continue
            try:
                _refuse_updated(node, updated)
                _read(node, reading, found, refuse)
            except NotTileable as reason:
                found.ends_at = found.ends_at or (_where(node), str(reason))
                if not once:
                    break
                _bar(node, reading, found)
    return _finished(model, nodes, entering, given, reading, found)


def _refuse_updated(node: fx.Node, updated: Collection[str]) -> None:
    """Leave what uses a buffer that forward passes update to what is computed once: boxes are computed several times,
    and again in the backward pass. Batch norm's own statistics are summed over boxes, and counted once."""
    if node.target is F.batch_norm:
        return
    targets = [str(node.target)] if node.op == "call_module" else []
    for path in (*targets, *(str(argument.target) for argument in node.all_input_nodes if argument.op == "get_attr")):
        if name := next((name for name in updated if f"{name}.".startswith(f"{path}.")), None):
            raise NotTileable(
                f"uses {name}, which each forward pass of training updates, and boxes would do so several times"
            )


def _bar(node: fx.Node, reading: Reading, found: _Found) -> None:
    """Leave ``node``, and whatever takes it, to what follows."""
    found.barred.add(node.name)
    for known in (reading.dims, reading.sides, found.constants):
        known.pop(node.name, None)
    maps = reading.maps(node)
    if maps and changes_in_place(reading, node):  # whoever takes it later takes what was written
        for other in in_same_memory(reading, node, maps[0]):
            if other is not maps[0] and any(node < user for user in other.users):
                raise ValueError(
                    f"{_where(node)} changes {maps[0].name} in place, and with it {other.name}, which is used later: "
                    "a team cannot do that outside what it computes side by side. Write it without in-place"
                )
        found.barred.add(maps[0].name)


def _channels_last(model: nn.Module) -> bool:
    """Whether the weights of convolutions are, as the tiles are then."""
    weights = (parameter for parameter in model.parameters() if parameter.dim() == 4)
    return any(w.is_contiguous(memory_format=torch.channels_last) and not w.is_contiguous() for w in weights)


def _where(node: fx.Node) -> str:
    kind = getattr(node.target, "__name__", node.target) if node.op == "call_function" else node.target
    return f"{node.name} ({kind})" if str(kind) != node.name else node.name


def _read(node: fx.Node, reading: Reading, found: _Found, refuse: Callable[[tuple[int, int]], str | None]) -> None:
    """Add what is known of ``node``."""
    maps = reading.maps(node)
    if barred := found.barred.intersection(argument.name for argument in node.all_input_nodes):
        raise NotTileable(_barred(reading, barred))
    if maps and node.op == "call_module":
        operation = read_node(reading, node)  # before it runs: a norm in training would count
        reading.of(node)
    else:
        try:
            value = reading.of(node)
        except Exception as fault:
            raise NotTileable(f"cannot be followed without data: {fault}") from fault
        if not has_tensors(value):
            found.constants[node.name] = value
            return
        if not maps or _takes_type_alone(node, maps):
            _plain(node, reading, found)
            return
        operation = read_node(reading, node)
    if not operation.of_sums and not operation.sums:
        value = next(leaf for leaf in tree_leaves(reading.of(node)) if isinstance(leaf, Tensor))
        if reason := refuse((value.shape[operation.dims[0]], value.shape[operation.dims[1]])):
            raise NotTileable(reason)
    _local(node, operation, reading, found)


def _takes_type_alone(node: fx.Node, maps: Sequence[fx.Node]) -> bool:
    """Whether a node takes no more of the maps than their type and device."""
    if node.op != "call_method":
        return False
    return node.target in MAKERS or (node.target in ("to", "type_as") and node.args[0] not in maps)


def _barred(reading: Reading, names: set[str]) -> str:
    if reading.once:
        return f"takes {min(names)}, which is made of what has ended"
    return "takes one of several maps that came together"


def _plain(node: fx.Node, reading: Reading, found: _Found) -> None:
    """What is computed once, of sums and parameters."""
    others = tuple(argument.name for argument in node.all_input_nodes if argument.name in found.plain)
    if not parameters_read(reading.model, node) and found.fixed.issuperset(others):
        found.fixed.add(node.name)
    else:
        module = module_of(reading.model, node)
        for part in module.modules() if module is not None and not reading.once else ():
            counts = isinstance(part, _BatchNorm) and part.track_running_stats
            draws = isinstance(part, _DropoutNd) and part.p > 0
            if part.training and (counts or draws):  # computed again in the backward pass
                raise NotTileable("counts or draws what has no rows any more, which boxes would do twice")
    found.plain.add(node.name)
    found.steps.append(Step(node.name, others=others, global_op=True))


def _local(node: fx.Node, operation: Operation, reading: Reading, found: _Found) -> None:
    maps = reading.maps(node)
    tensors = [leaf for leaf in tree_leaves(reading.of(node)) if isinstance(leaf, Tensor)]
    if not all(tensor.is_floating_point() for tensor in tensors):
        raise NotTileable("gives other than numbers with fractions")
    numbers = sum(tensor.numel() for tensor in tensors)
    size = numbers * tensors[0].element_size()
    others = tuple(a.name for a in node.all_input_nodes if a.name in found.plain)
    sides = reading.sides[maps[0].name]
    before: tuple[str, ...] = ()
    for prior in operation.first:
        name, takes = node.name + prior.suffix, tuple(source.name for source in maps)
        if prior.once:
            found.fixed.add(name)
            found.steps.append(Step(name, others=before, global_op=True))
        else:
            found.steps.append(Step(name, takes, before, sides=sides, sums=True, flops=10.0 * numbers))
        found.plain.add(name)
        found.operations[name], found.nodes[name] = prior.operation, node
        before = (*before, name)
    others = (*others, *before)
    if operation.of_sums:
        found.plain.add(node.name)
        found.operations[node.name] = operation
        found.steps.append(Step(node.name, others=others, global_op=True))
        return
    if operation.sums:
        found.plain.add(node.name)
        flops = 2.0 * tensors[0].numel() * sides[0] * sides[1]
    else:
        flops = operation.flops_each * numbers
        wanted = tuple(tensors[0].shape[dim] for dim in operation.dims)
        given = tuple(rule.out(side) for rule, side in zip(operation.rules, sides, strict=True))
        assert given == wanted, f"{node.name}: rules give {given}, torch {wanted}"
        reading.dims[node.name], reading.sides[node.name] = operation.dims, (wanted[0], wanted[1])
        sides = (wanted[0], wanted[1])
        if operation.shares:
            reading.aliases[node.name] = maps[0]
    found.operations[node.name] = operation
    found.steps.append(
        Step(
            node.name,
            tuple(source.name for source in maps),
            others,
            operation.rules,
            sides,
            operation.sums,
            flops=flops,
            value_bytes=size,
            draws_whole=operation.drawn is not None,
            normed=operation.norm is not None,
        )
    )


def _asked_for(steps: Sequence[Step]) -> list[Step]:
    """Without what no map is made of, which one member computes."""
    kept: list[Step] = []
    asked: set[str] = set()
    for step in reversed(steps):
        if not step.global_op or step.name in asked:
            kept.append(step)
            asked.update(step.others)
    return kept[::-1]


def _finished(
    model: nn.Module,
    nodes: Sequence[fx.Node],
    entering: Mapping[str, Tensor | Boxes],
    given: Mapping[str, Any],
    reading: Reading,
    found: _Found,
) -> Region:
    """Without what is made of the last sums, which what follows computes."""
    last = max((k for k, step in enumerate(found.steps) if not step.global_op), default=-1)
    if found.ends_at is not None and found.ends_at[1] == ADVICE and not reading.once:
        raise ValueError(f"--stream computes a tile box by box, and cannot pass {found.ends_at[0]}: {ADVICE}")
    steps = found.steps[: last + 1]
    if reading.once:
        steps = _asked_for(steps)
    if not any(step.flops and not step.sums for step in steps):
        layer, reason = found.ends_at or ("the model", "has no layer that takes maps")
        raise NothingTileable(layer, reason)
    made = {step.name for step in steps}
    by_name = {node.name: node for node in nodes}
    inside = made | found.constants.keys()
    leaving = tuple(
        step.name
        for step in steps
        if step.name in by_name and any(user.name not in inside for user in by_name[step.name].users)
    )
    values = {name: value for name, value in reading.values.items() if name in reading.dims}
    whole = [name for name in leaving if isinstance(values.get(name), (tuple, list))]
    if whole and not reading.once:
        raise ValueError(f"--stream: {whole[0]} is several maps, which leave what is computed box by box together")
    nodes_of = by_name | found.nodes
    tensors = {name: value for name, value in given.items() if isinstance(value, Tensor)}
    flows = {n for n, value in {**entering, **tensors}.items() if isinstance(value, Tensor) and value.requires_grad}
    for step in steps:
        trained = (p.requires_grad for p in parameters_read(model, nodes_of[step.name]))
        if step.name not in found.fixed and (flows.intersection(step.inputs) or any(trained)):
            flows.add(step.name)
    pooled = {name: reading.values.get(name) for name in found.plain}
    return Region(
        tuple(replace(step) for step in steps),
        found.operations,
        nodes_of,
        reading.dims,
        reading.sides,
        _forms({**values, **tensors}),
        found.constants,
        frozenset(found.fixed),
        leaving,
        tuple(entering),
        tuple(tensors),
        frozenset(flows),
        found.ends_at,
        _forms(pooled),
    )


def _forms(values: Mapping[str, Any]) -> Forms:
    return {n: (tuple(v.shape), v.dtype, v.device) for n, v in values.items() if isinstance(v, Tensor)}
