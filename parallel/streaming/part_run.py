"""Computes one box of a part: patches are cut, operations run in order, values freed after their last use."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from parallel.space.rule import Step
from parallel.streaming.maps import Maps
from parallel.streaming.operation import Arguments, attribute
from parallel.streaming.part_plan import BoxProgram, PartPlan, Pieces
from parallel.streaming.patch import Patch, cut_value, with_parts
from parallel.streaming.region import Region

Resolve = Callable[[Any], Any]


def run_box(
    module: nn.Module,
    part: PartPlan,
    program: BoxProgram,
    place: tuple[int, int],
    fetched: Mapping[str, Tensor],
    known: Mapping[str, Any],
    resolve: Resolve,
    stored: Maps | None = None,
) -> dict[str, Any]:
    """Return what a box gives, by name.

    Args:
        module: has the modules and parameters.
        program: of the box.
        fetched: what it needs of each map that enters the part.
        known: values without rows, and random masks.
        resolve: as ``resolver`` returns it.
        stored: maps that the part gave before, when it is computed for its gradients alone.
    """
    row, column = place
    rows, columns = part.rows[row], part.columns[column]
    row_needs, column_needs = part.lines[0][row].needs, part.lines[1][column].needs
    values: dict[str, Any] = dict(fetched)
    split: dict[str, list[Tensor]] = {}

    def put(name: str, value: Any, pieces: Pieces) -> None:
        if isinstance(value, Tensor) and value.requires_grad:
            values[name], *split[name] = with_parts(value, *pieces)

    for name, pieces in program.entering:
        if pieces is not None:
            put(name, values[name], pieces)
    for step in program.steps:
        box = rows[step.name], columns[step.name]
        patches = {}
        for name, number, cut, piece, sides, dims in step.uses:
            value = values[name]
            if piece is not None and name in split:
                value = split[name][piece]
            elif cut is not None:
                value = cut_value(value, dims, cut)
            (needed_rows, there_rows), (needed_columns, there_columns) = row_needs[number], column_needs[number]  # type: ignore[misc]
            there = there_rows, there_columns
            patches[name] = Patch(value, (needed_rows, needed_columns), there, box, sides, dims)
        value = None
        for name in step.finished:
            del values[name]
            split.pop(name, None)
        compute, at_hand = step.operation.compute, None
        if stored is not None and step.live_out:
            if step.looked_at and step.operation.again and step.name in stored:
                at_hand = stored.fetch(step.name, box)
            if at_hand is not None or not step.looked_at:
                compute = step.operation.again or compute
        given = Arguments(module, step.node, patches, resolve, step.may_change, known, stored=at_hand)
        patches = {}
        values[step.name] = compute(given)
        del given
        if step.pieces is not None:
            put(step.name, values[step.name], step.pieces)
    results = {}
    for name, axes, cut, piece in program.results:
        value = values[name]
        if piece is not None and name in split:
            value = split[name][piece]
        elif cut is not None and axes is not None:
            value = cut_value(value, axes, cut)
        results[name] = value
    return results


def fetch_ahead(part: PartPlan, place: tuple[int, int], maps: Maps, gradients: Maps | None) -> None:
    """Begin to fetch what a box will take; with ``gradients``, in its backward pass."""
    program, (rows, columns) = part.program(*place), (part.rows[place[0]], part.columns[place[1]])
    for name, _ in program.entering:
        maps.begin(name, (rows[name], columns[name]))
    if gradients is None:
        return
    for step in program.steps:
        if step.live_out and step.looked_at and step.operation.again:
            maps.begin(step.name, (rows[step.name], columns[step.name]))
    for name in program.gives:
        if name in part.region.dims:
            gradients.begin(name, part.box(name, *place))


def resolver(module: nn.Module, region: Region, known: Mapping[str, Any]) -> Callable[[Any], Any]:
    """Return node -> value, of nodes that are no maps."""

    def resolve(node: Any) -> Any:
        if node.op == "get_attr":
            return attribute(module, node)
        if node.name in region.constants:
            return region.constants[node.name]
        return known[node.name] if node.name in known else _template(region, node.name)

    return resolve


def _template(region: Region, name: str) -> Tensor:
    """Return an empty tensor in the type and on the device of a map."""
    _, dtype, device = region.forms[name]
    return torch.empty(0, dtype=dtype, device=device)


def run_plain(module: nn.Module, region: Region, step: Step, known: Mapping[str, Any]) -> Any:
    """Return the value of a step without rows."""
    node, operation = region.nodes[step.name], region.operations.get(step.name)
    template = _template(region, node.name) if node.name in region.forms else None
    given = Arguments(module, node, {}, resolver(module, region, known), known=known, template=template)
    return given.run() if operation is None else operation.compute(given)
