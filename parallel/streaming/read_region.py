"""Read the region of a traced model that can be computed box by box: from what enters to the first node that cannot.

Takes the nodes of a model or stage and the shapes that enter; returns the steps of the plan and their computations.
What follows the region is computed whole.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef

from parallel.space.rule import Step
from parallel.streaming.layer import Reading
from parallel.streaming.operation import DIMS, NotTileable, Operation, parameters_of
from parallel.streaming.read_node import (
    changes_in_place,
    read_node,
    refuse_updated,
    takes_type_alone,
    updates_statistics,
)
from parallel.streaming.read_norm import ADVICE, RUNNING
from parallel.streaming.region import Forms, Region
from parallel.trace.known_proxy import as_traced
from parallel.trace.op_recorder import tensors_of
from parallel.trace.stage_module import Boxes
from parallel.trace.without_data import without_data

NOTHING: Mapping[str, Any] = MappingProxyType({})


class NothingTileable(ValueError):
    """No layer can be computed box by box; says which is the first, and why.

    Attributes:
        ends_at: (layer, reason).
    """

    def __init__(self, layer: str, reason: str) -> None:
        super().__init__(f"--stream finds nothing to compute box by box: {layer} {reason}. Leave --stream out")
        self.ends_at = layer, reason


def read_region(
    model: nn.Module,
    nodes: Sequence[fx.Node],
    entering: Mapping[str, Tensor | Boxes],
    given: Mapping[str, Any] = NOTHING,
    refuse: Callable[[tuple[int, int]], str | None] = lambda sides: None,
    once: bool = False,
    updated: Collection[str] = (),
    random: Collection[str] = (),
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
        random: names of nodes that may draw in training.

    Raises:
        NothingTileable: it would be empty.
        ValueError: it would end at a norm, with what to do about it; not with ``once``. Or what follows it changes in
            place a map that shares memory with another one of the region, or takes several maps as one value.
    """
    reader = _Reader(model, once, refuse, random if model.training else ())
    with without_data() as fake:
        reader.add_inputs(fake, entering, given)
        for node in nodes:
            if node.op in ("output", "get_attr") or node.name in entering or node.name in given:
                continue
            if once or reader.ends_at is None:
                try:
                    refuse_updated(node, updated)
                    reader.read(node)
                    continue
                except NotTileable as reason:
                    reader.ends_at = reader.ends_at or (_where(node), str(reason))
            reader.bar(node)
    return reader.region(nodes, entering, given)


class _Reader:
    """Region so far, while its nodes are read in order; ``barred``: names that it cannot take."""

    def __init__(
        self, model: nn.Module, once: bool, refuse: Callable[[tuple[int, int]], str | None], random: Collection[str]
    ) -> None:
        self._model, self._once, self._refuse, self._random = model, once, refuse, random
        self._reading = Reading(model, once)
        self.steps: list[Step] = []
        self.operations: dict[str, Operation] = {}
        self.nodes: dict[str, fx.Node] = {}
        self.constants: dict[str, Any] = {}
        self._updates: dict[Any, tuple[str, ...]] = {}  # last step that updates statistics, by path of the norm
        self.fixed: set[str] = set()
        self.without_rows: set[str] = set()
        self.barred: set[str] = set()
        self.ends_at: tuple[str, str] | None = None

    def add_inputs(
        self, fake: FakeTensorMode, entering: Mapping[str, Tensor | Boxes], given: Mapping[str, Any]
    ) -> None:
        """Add the values that enter the region."""
        reading, once = self._reading, self._once
        layout = torch.channels_last if once and _channels_last(self._model) else torch.contiguous_format
        for name, value in entering.items():
            if isinstance(value, Tensor) and not once:
                reading.values[name] = fake.from_tensor(value.detach())
            else:
                form: dict[str, Any] = {"dtype": value.dtype, "device": value.device, "memory_format": layout}
                reading.values[name] = torch.empty(value.shape, **form)
            reading.dims[name], reading.sides[name] = DIMS, (value.shape[2], value.shape[3])
        for name, value in given.items():
            if isinstance(value, Tensor):
                reading.values[name] = fake.from_tensor(value.detach())
                self.without_rows.add(name)
                if not value.requires_grad:
                    self.fixed.add(name)
            elif tensors_of(value):
                self.barred.add(name)
            else:
                reading.values[name] = self.constants[name] = value

    def read(self, node: fx.Node) -> None:
        """Add ``node`` to the region. Raises NotTileable where it cannot be computed box by box."""
        reading, maps = self._reading, self._reading.maps(node)
        if barred := self.barred.intersection(argument.name for argument in node.all_input_nodes):
            made_of = f"takes {min(barred)}, which is made of what has ended"
            raise NotTileable(made_of if self._once else "takes one of several maps that came together")
        if maps and node.op == "call_module":
            operation = read_node(reading, node)  # before it runs: a norm in training would count
            reading.of(node)
        else:
            try:
                value = reading.of(node)
            except Exception as fault:
                raise NotTileable(f"cannot be followed without data: {fault}") from fault
            takes = [tensor for argument in node.all_input_nodes for tensor in tensors_of(reading.of(argument))]
            if value is None and takes and node.target is not as_traced:
                raise NotTileable("gives no value, as an assignment to parts of a tensor: use torch.cat instead")
            if not tensors_of(value):
                self.constants[node.name] = value
                return
            if not maps or takes_type_alone(node, maps):
                self._add_plain(node)
                return
            operation = read_node(reading, node)
        if not operation.of_sums and not operation.sums:
            value = tensors_of(reading.of(node))[0]
            if reason := self._refuse((value.shape[operation.dims[0]], value.shape[operation.dims[1]])):
                raise NotTileable(reason)
        self._add(node, operation)

    def bar(self, node: fx.Node) -> None:
        """Leave ``node``, and the nodes that take its value or what it changes, to what follows the region."""
        self.barred.add(node.name)
        for known in (self._reading.dims, self._reading.sides, self.constants):
            known.pop(node.name, None)
        if not changes_in_place(self._model, node):
            return
        source, shared = node.all_input_nodes[0], self._sharing(node)
        self.barred.update({source.name, *(other.name for other in shared)})
        # As in y[:, :2] += 1, which assigns the changed part to y again.
        written_to = [u.args[0] for u in node.users if u.target is operator.setitem and u.args[2] is node]
        owner = source
        while owner.name not in self._reading.dims and owner.name not in self.without_rows and owner.all_input_nodes:
            owner = owner.all_input_nodes[0]
        for other in shared:
            apart = other.name in self._reading.dims or not self._once
            if apart and other not in (owner, *written_to) and any(node < user for user in other.users):
                raise ValueError(
                    f"{_where(node)} changes {source.name} in place, and with it {other.name}, which is used later: "
                    "--stream and --grid keep the two apart. Write it without in-place"
                )

    def _add_plain(self, node: fx.Node) -> None:
        """Add a node that is computed once, of sums and parameters."""
        others = tuple(argument.name for argument in node.all_input_nodes if argument.name in self.without_rows)
        differentiable = any(t.is_floating_point() or t.is_complex() for t in tensors_of(self._reading.of(node)))
        if not differentiable or (not parameters_of(self._model, (node,)) and self.fixed.issuperset(others)):
            self.fixed.add(node.name)
        if not self._once:
            self._refuse_recomputed(node)
        self.without_rows.add(node.name)
        self.steps.append(Step(node.name, others=others, global_op=True))

    def _refuse_recomputed(self, node: fx.Node) -> None:
        """Refuse a node without rows that gives other numbers in the backward pass, or at another place."""
        fixed = node.name in self.fixed
        if not fixed and (updates_statistics(self._reading, node) or node.name in self._random):
            raise NotTileable("draws or updates statistics where no rows are left: boxes would do so twice")
        for other in self._sharing(node) if changes_in_place(self._model, node) else ():
            # Fixed values are changed before any box is computed, others in a copy.
            if any(node < user if not fixed else user < node and user.name not in self.fixed for user in other.users):
                raise NotTileable(f"changes {other.name} in place, which is used again by that name")

    def _sharing(self, node: fx.Node) -> list[fx.Node]:
        """Return the nodes before ``node`` whose values share the memory of its first argument."""
        memory = self._reading.storages(node.all_input_nodes[0].name)
        before = itertools.takewhile(lambda other: other is not node, node.graph.nodes)
        known = [other for other in before if other.name in self.without_rows or other.name in self._reading.dims]
        return [other for other in known if memory & self._reading.storages(other.name)]

    def _add(self, node: fx.Node, operation: Operation) -> None:
        """Add a node that takes maps, with the steps before it."""
        reading, name = self._reading, node.name
        tensors = tensors_of(reading.of(node))
        if not all(tensor.is_floating_point() for tensor in tensors):
            raise NotTileable("gives other than numbers with fractions")
        maps = tuple(source.name for source in reading.maps(node))
        numbers, sides = sum(tensor.numel() for tensor in tensors), reading.sides[maps[0]]
        others = tuple(a.name for a in node.all_input_nodes if a.name in self.without_rows)
        before: tuple[str, ...] = ()
        for prior in operation.first:
            step, made_of = name + prior.suffix, before
            if prior.suffix == RUNNING and node.op == "call_module":  # a norm that is called twice counts in order
                made_of = (*before, *self._updates.get(node.target, ()))
                self._updates[node.target] = (step,)
            if prior.once:
                self.fixed.add(step)
                self.steps.append(Step(step, others=made_of, global_op=True))
            else:
                self.steps.append(Step(step, maps, before, sides=sides, sums=True, flops=10.0 * numbers))
            self.without_rows.add(step)
            self.operations[step], self.nodes[step] = prior.operation, node
            before = (*before, step)
        self.operations[name] = operation
        if operation.sums or operation.of_sums:
            self.without_rows.add(name)
        if operation.of_sums:
            self.steps.append(Step(name, others=(*others, *before), global_op=True))
            return
        flops = operation.flops_each * numbers
        if operation.sums:
            flops = 2.0 * tensors[0].numel() * sides[0] * sides[1]
        else:
            rows, columns = (tensors[0].shape[dim] for dim in operation.dims)
            ruled = tuple(rule.out(side) for rule, side in zip(operation.rules, sides, strict=True))
            assert ruled == (rows, columns), f"{name}: rules give {ruled}, torch {rows, columns}"
            reading.dims[name], reading.sides[name] = operation.dims, (rows, columns)
            sides = rows, columns
            if operation.shares:
                reading.aliases[name] = reading.maps(node)[0]
        self.steps.append(
            Step(
                name,
                maps,
                (*others, *before),
                operation.rules,
                sides,
                operation.sums,
                flops=flops,
                value_bytes=numbers * tensors[0].element_size(),
                draws_whole=operation.drawn is not None,
            )
        )

    def region(
        self, nodes: Sequence[fx.Node], entering: Mapping[str, Tensor | Boxes], given: Mapping[str, Any]
    ) -> Region:
        """Return the region without what is made of the last sums, which what follows computes."""
        reading, once = self._reading, self._once
        last = max((k for k, step in enumerate(self.steps) if not step.global_op), default=-1)
        if self.ends_at is not None and self.ends_at[1] == ADVICE and not once:
            raise ValueError(f"--stream computes a tile box by box, and cannot pass {self.ends_at[0]}: {ADVICE}")
        by_name = {node.name: node for node in nodes}
        steps = self._used(self.steps[: last + 1], by_name) if once else self.steps[: last + 1]
        if not any(step.flops and not step.sums for step in steps):
            raise NothingTileable(*(self.ends_at or ("the model", "has no layer that takes maps")))
        inside = {step.name for step in steps} | self.constants.keys()
        live_out = tuple(
            step.name
            for step in steps
            if step.name in by_name and any(user.name not in inside for user in by_name[step.name].users)
        )
        values = {name: value for name, value in reading.values.items() if name in reading.dims}
        parted = values if once else reading.values  # each member of a team has pooled tensors whole
        several = next((name for name in live_out if isinstance(parted.get(name), (tuple, list))), None)
        if several is not None:
            user = next(user.name for user in by_name[several].users if user.name not in inside)
            why = f"{several} is several tensors, which {user} takes outside the boxes: take them apart before"
            raise ValueError(f"--stream and --grid: {why}, as a, b = y.chunk(2, 1)")
        tensors = {name: value for name, value in given.items() if isinstance(value, Tensor)}
        flows = {n for n, value in {**entering, **tensors}.items() if isinstance(value, Tensor) and value.requires_grad}
        for step in steps:
            read = parameters_of(self._model, [by_name[step.name]] if step.name in by_name else [])  # moments read none
            if step.name not in self.fixed and (flows.intersection(step.inputs) or any(p.requires_grad for p in read)):
                flows.add(step.name)
        return Region(
            steps=tuple(steps),
            operations=self.operations,
            nodes=by_name | self.nodes,
            dims=reading.dims,
            sides=reading.sides,
            forms=_forms({**values, **tensors}),
            constants=self.constants,
            fixed=frozenset(self.fixed),
            live_out=live_out,
            inputs=tuple(entering),
            given=tuple(tensors),
            flows=frozenset(flows),
            ends_at=self.ends_at,
            pooled=_forms({name: reading.values.get(name) for name in self.without_rows}),
        )

    def _used(self, steps: Sequence[Step], nodes: Mapping[str, fx.Node]) -> list[Step]:
        """Return the steps that maps are made of, or that change their values; one member computes the others."""
        kept: list[Step] = []
        used: set[str] = set()
        memory: set[StorageWeakRef] = set()
        for step in reversed(steps):
            changes = step.name in nodes and changes_in_place(self._model, nodes[step.name])
            if not step.global_op or step.name in used or (changes and memory & self._reading.storages(step.name)):
                kept.append(step)
                used.update(step.others)
                memory.update(*map(self._reading.storages, step.others))
        return kept[::-1]


def _channels_last(model: nn.Module) -> bool:
    """Return whether the weights of convolutions are, as the tiles are then."""
    weights = (parameter for parameter in model.parameters() if parameter.dim() == 4)
    return any(w.is_contiguous(memory_format=torch.channels_last) and not w.is_contiguous() for w in weights)


def _where(node: fx.Node) -> str:
    kind = getattr(node.target, "__name__", node.target) if node.op == "call_function" else node.target
    return f"{node.name} ({kind})" if str(kind) != node.name else node.name


def _forms(values: Mapping[str, Any]) -> Forms:
    return {n: (tuple(v.shape), v.dtype, v.device) for n, v in values.items() if isinstance(v, Tensor)}
