"""Computes one box of a part: patches are cut, operations run in order, values let go of after their last use."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from parallel.space.box_bytes import Cuts
from parallel.space.parts import Part, owned, wanted_from
from parallel.space.proof import partition_faults, rule_faults, span_faults
from parallel.space.span import Span
from parallel.space.spans import needed_spans
from parallel.space.step import Step
from parallel.streaming.maps import Maps
from parallel.streaming.narrowing import narrowed, with_parts
from parallel.streaming.operation import Arguments, attribute
from parallel.streaming.patch import Box, Patch, cut_of, cut_patch, had
from parallel.streaming.region import Region

Spans = Mapping[str, Span]


@dataclass(frozen=True)
class PartPlan:
    """One part of a region, ready to be computed.

    Attributes:
        steps: of the part.
        entering: names of the maps that it fetches.
        given: steps whose values leave it.
        rows: for each row of boxes the rows of every map that it computes or fetches.
        columns: likewise.
        cells: (rows, columns) of each box in what is given, by name.
        finished: names of the values that a step is the last to use, by its name.
        users: steps that use a map, by its name.
        alone: names of steps that are the only ones to use what they take.
        mine: rows and columns of boxes that are computed here; None: all.
    """

    steps: tuple[Step, ...]
    entering: tuple[str, ...]
    given: tuple[Step, ...]
    rows: tuple[Spans, ...]
    columns: tuple[Spans, ...]
    cells: Mapping[str, tuple[tuple[Span, ...], tuple[Span, ...]]]
    finished: Mapping[str, tuple[str, ...]]
    users: Mapping[str, tuple[Step, ...]]
    alone: frozenset[str]
    mine: tuple[range, range] | None = None

    def boxes(self) -> list[tuple[int, int]]:
        """(row, column) of every box that is computed here and gives something."""
        return self.boxes_of(self.mine or (range(len(self.rows)), range(len(self.columns))))

    def boxes_of(self, numbers: tuple[range, range]) -> list[tuple[int, int]]:
        """(row, column) of those of these rows and columns of boxes that give something."""
        return [(row, column) for row in numbers[0] for column in numbers[1] if self.giving(row, column)]

    def giving(self, row: int, column: int) -> list[Step]:
        """What a box gives: not what has no px there."""
        return [
            step for step in self.given if self.cells[step.name][0][row].size and self.cells[step.name][1][column].size
        ]

    def box(self, name: str, row: int, column: int) -> Box:
        """The box of what is given."""
        rows, columns = self.cells[name]
        return rows[row], columns[column]


def plan_part(
    region: Region,
    steps: Sequence[Step],
    part: Part,
    leaving: Collection[str],
    cuts: Cuts,
    mine: tuple[range, range] | None = None,
) -> PartPlan:
    """Return the part of a phase, whose ``steps`` these are.

    Args:
        cuts: where its boxes begin and end, px of the tile.
        mine: rows and columns of boxes that are computed here; None: all.
    """
    own = tuple(steps[part.start : part.stop])
    given = tuple(wanted_from(steps, part.stop, leaving, part.start))
    cells = {step.name: (owned(step, cuts, 0), owned(step, cuts, 1)) for step in given}
    by_axis = []
    for axis in (0, 1):
        spans = []
        for k in range(len(cuts[axis]) - 1):
            wanted = {name: places[axis][k] for name, places in cells.items() if places[axis][k].size}
            spans.append(needed_spans(own, wanted, region.sides, axis))
        by_axis.append(tuple(spans))
    faults = [
        fault for axis in (0, 1) for spans in by_axis[axis] for fault in span_faults(own, spans, region.sides, axis)
    ]
    faults += rule_faults(own, region.sides)
    for step in given:
        for axis in (0, 1):
            faults += partition_faults(step.name, cells[step.name][axis], step.sides[axis])
    assert not faults, "; ".join(faults[:3])
    made = {step.name for step in own}
    entering = dict.fromkeys(name for step in own for name in step.maps if name not in made)
    last = {name: step.name for step in own for name in step.maps}
    kept = {step.name for step in given}
    finished: dict[str, tuple[str, ...]] = {}
    for name, user in last.items():
        if name not in kept:
            finished[user] = (*finished.get(user, ()), name)
    alone = frozenset(
        step.name
        for step in own
        if len(step.maps) == 1 and step.maps[0] in made - kept and _single(region, step.maps[0])
    )
    users: dict[str, tuple[Step, ...]] = {}
    for step in own:
        for name in step.maps:
            users[name] = (*users.get(name, ()), step)
    return PartPlan(own, tuple(entering), given, by_axis[0], by_axis[1], cells, finished, users, alone, mine)


def _single(region: Region, name: str) -> bool:
    """The value is used once and lies in memory of its own."""
    return len(region.nodes[name].users) == 1 and not region.operations[name].shares


def run_box(
    module: nn.Module,
    region: Region,
    part: PartPlan,
    place: tuple[int, int],
    fetched: Mapping[str, Tensor],
    known: Mapping[str, Any],
    stored: Maps | None = None,
) -> dict[str, Tensor]:
    """Return what a box gives, by name.

    Args:
        module: has the modules and parameters.
        fetched: what it needs of each map that enters the part.
        known: values without rows, and random masks.
        stored: maps that the part gave before, when it is computed for its gradients alone.
    """
    run = _BoxRun(region, part, place, {step.name for step in part.giving(*place)})
    for name, value in fetched.items():
        run.put(name, value)
    resolve = resolver(module, region, known)
    for step in part.steps:
        if not run.has(step.name):
            continue
        patches = run.patches(step)
        for name in part.finished.get(step.name, ()):
            del run.values[name]
            run.parts.pop(name, None)
        whole = step.name in part.alone and all(patch.have == run.box(name) for name, patch in patches.items())
        operation = region.operations[step.name]
        again, at_hand = None, None
        if stored is not None and step.name in run.giving:
            looked_at = not step.sums and bool(run.users(step.name))
            at_hand = stored.fetch(step.name, run.box(step.name)) if looked_at and step.name in stored else None
            again = None if looked_at and at_hand is None else operation.again
        given = Arguments(module, region.nodes[step.name], patches, resolve, whole, known, stored=at_hand)
        run.put(step.name, (again or operation.compute)(given))
    return run.results()


class _BoxRun:
    """The values of one box as they come and go."""

    def __init__(self, region: Region, part: PartPlan, place: tuple[int, int], giving: set[str]) -> None:
        self._region, self._part, self._place, self.giving = region, part, place, giving
        self._rows, self._columns = part.rows[place[0]], part.columns[place[1]]
        self.values: dict[str, Any] = {}
        self.parts: dict[str, dict[Box, Any]] = {}

    def has(self, name: str) -> bool:
        """The box computes or fetches it."""
        return name in self._rows and name in self._columns

    def box(self, name: str) -> Box:
        return self._rows[name], self._columns[name]

    def users(self, name: str) -> list[Step]:
        """Return the steps of the box that use a map."""
        return [step for step in self._part.users.get(name, ()) if self.has(step.name)]

    def put(self, name: str, value: Any) -> None:
        """A value, which is handed on in parts where some need less of it than others, and a gradient will return."""
        self.values[name] = value
        if name not in self._region.dims or not isinstance(value, Tensor) or not value.requires_grad:
            return
        has, sides = self.box(name), self._region.sides[name]
        users = self.users(name)
        wanted = {step.name: had(self._need(step, sides), has, sides) for step in users}
        smaller = [have for have in wanted.values() if have != has]
        if name in self.giving and self._own(name) != has:
            smaller.append(self._own(name))
        elif name in self.giving:
            return
        if smaller and all(self._region.operations[s.name].fresh for s in users if wanted[s.name] == has):
            boxes = list(dict.fromkeys(smaller))
            whole, *parts = with_parts(value, self._region.dims[name], [cut_of(have, has) for have in boxes])
            self.values[name], self.parts[name] = whole, dict(zip(boxes, parts, strict=True))

    def _own(self, name: str) -> Box:
        return self._part.box(name, *self._place)

    def _need(self, step: Step, sides: tuple[int, int]) -> Box:
        rows, columns = self.box(step.name)
        return step.rules[0].need(rows, sides[0]), step.rules[1].need(columns, sides[1])

    def patches(self, step: Step) -> dict[str, Patch]:
        """What ``step`` is handed of each map."""
        region, found = self._region, {}
        for name in step.maps:
            sides, dims = region.sides[name], region.dims[name]
            need = self._need(step, sides)
            found[name] = cut_patch(
                self.values[name], self.box(name), need, self.box(step.name), sides, dims, self.parts.get(name, {})
            )
        return found

    def results(self) -> dict[str, Tensor]:
        """What the box gives, by name."""
        found = {}
        for name in self.giving:
            value = self.values[name]
            if name in self._region.dims:
                own, has = self._own(name), self.box(name)
                part = self.parts.get(name, {}).get(own)
                value = narrowed(value, self._region.dims[name], cut_of(own, has)) if part is None else part
            found[name] = value
        return found


def resolver(module: nn.Module, region: Region, known: Mapping[str, Any]) -> Callable[[Any], Any]:
    """What nodes that are no maps stand for."""

    def resolve(node: Any) -> Any:
        if node.op == "get_attr":
            return attribute(module, node)
        if node.name in region.constants:
            return region.constants[node.name]
        return known[node.name] if node.name in known else _template(region, node.name)

    return resolve


def _template(region: Region, name: str) -> Tensor:
    """Nothing, in the type and on the device of a map."""
    _, dtype, device = region.forms[name]
    return torch.empty(0, dtype=dtype, device=device)


def run_plain(module: nn.Module, region: Region, step: Step, known: Mapping[str, Any]) -> Any:
    """Return the value of a step without rows."""
    node = region.nodes[step.name]
    if step.name in region.operations:
        template = _template(region, node.name) if node.name in region.forms else None
        given = Arguments(module, node, {}, resolver(module, region, known), known=known, template=template)
        return region.operations[step.name].compute(given)
    return Arguments(module, node, {}, resolver(module, region, known)).run()
