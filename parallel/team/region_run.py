"""Compute a region box by box, forward and backward: exact gradients, as sums over boxes of what each box gives.

The boxes of a part are a partition of its output. Each box's backward pass gives its share of the gradients: of
parameters, of values without rows, and of the maps that the part fetched, where halos of neighbouring boxes add up.
Only maps and sums are saved for backward (Chen et al. 2016 over depth; Pinckaers et al. 2020 over space, in one part
and without maps).

A member of a team computes the boxes of its part of the tile; a rank alone is a team of one, and exchanges nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn

from parallel.offload.copies import Copies
from parallel.offload.host_memory import HostMemory
from parallel.space.boxes import plan_boxes
from parallel.space.rule import Step
from parallel.space.team import TeamGrid
from parallel.streaming.maps import Gradients, Maps
from parallel.streaming.moments import HALVES
from parallel.streaming.operation import parameters_of
from parallel.streaming.part_plan import PartPlan, plan_part
from parallel.streaming.part_run import fetch_ahead, resolver, run_box, run_plain
from parallel.streaming.read_node import changes_in_place
from parallel.streaming.region import Region
from parallel.streaming.strip_maps import StripMaps, column_cuts
from parallel.team.halo_exchange import RegionExchange
from parallel.team.team_comm import ForwardContext, TeamComm
from parallel.team.team_plan import BoxedParts
from parallel.trace.stage_module import Boxes


@dataclass(frozen=True)
class Phase:
    """Steps and parts that can be computed once all sums before them are known."""

    plain: tuple[Step, ...]
    parts: tuple[PartPlan, ...]

    @functools.cached_property
    def sums(self) -> list[str]:
        """Return names of the sums that it ends with, in order."""
        return [step.name for part in self.parts for step in part.live_steps if step.sums]


@dataclass
class Kept:
    """Maps and values that the forward pass saves for backward."""

    maps: Maps
    known: dict[str, Any]


class RegionRun:
    """A region planned for tiles of one size, on one member of a team.

    Phases, parts and the order of sums are planned for the whole tile, so that all members come to the same messages.

    Args:
        region: as it was read.
        grid: of the team.
        comm: with the other members.
        side: rows and columns of the tile; None: of the largest map that enters.
        random: names of nodes that may draw.

    Attributes:
        boxes: the plan.
        phases: in order.
        context: the forward pass under way.

    Raises:
        ValueError: a value of several maps is used on both sides of a sum.
    """

    context: ForwardContext

    def __init__(
        self,
        region: Region,
        boxed: BoxedParts,
        grid: TeamGrid,
        comm: TeamComm,
        *,
        side: tuple[int, int] | None = None,
        random: Collection[str] = (),
    ) -> None:
        self.region, self._comm, self._host, self._random = region, comm, boxed.host, random
        self.boxes = boxes = plan_boxes(region.spec(side), boxed.box, grid, boxed.stored_bytes)
        self.phases = [
            Phase(
                phase.global_steps,
                tuple(
                    plan_part(
                        region, phase.steps, part, phase.live_out, boxes.cuts(part), boxes.places(comm.member, part)
                    )
                    for part in phase.parts
                ),
            )
            for phase in boxes.phases
        ]
        self._exchange = RegionExchange(region, boxes, [phase.parts for phase in self.phases], comm)
        self._on_device = boxes.on_device(boxed.map_bytes)
        self._shapes = {name: shape for name, (shape, _, _) in region.forms.items()}
        self._cuts = column_cuts(part for phase in self.phases for part in phase.parts)
        last_use = {name: part for phase in self.phases for part in phase.parts for name in part.entering}
        self._fetched, self._last_uses = last_use.keys(), dict[int, list[str]]()
        for name, part in last_use.items():
            if name not in region.live_out:
                self._last_uses.setdefault(id(part), []).append(name)

    def _maps(self, device: torch.device, here: frozenset[str]) -> Maps:
        """Return where maps between parts, or their gradients, are kept."""
        self._host = self._host or HostMemory(Copies.for_device(device))
        forms = self._shapes, self.region.dims, device, self._host, here | self._on_device, self._exchange.held
        return StripMaps(*forms, cuts=self._cuts) if self._host.copies.pinned else Maps(*forms)

    def forward(
        self, module: nn.Module, entering: Sequence[Tensor | Boxes], keep: bool, others: Mapping[str, Any]
    ) -> tuple[tuple[Tensor, ...], Kept]:
        """Return what leaves the region, in order, and what its backward pass needs.

        Args:
            keep: there will be one.
            others: values without rows that enter, by name.
        """
        region, exchange, device = self.region, self._exchange, entering[0].device
        kept = Kept(self._maps(device, frozenset(region.live_out)), dict(others))
        for name, value in zip(region.inputs, entering, strict=True):
            exchange.put(kept.maps, name, value)
            if name in exchange.names:
                exchange.fetch(kept.maps, name)
        with torch.no_grad():
            for phase in self.phases:
                for step in phase.plain:
                    kept.known[step.name] = self._plain_forward(module, step, kept.known)
                for part in phase.parts:
                    self._part_forward(module, part, kept)
                    for step in part.live_steps:
                        if step.name in exchange.names:
                            exchange.fetch(kept.maps, step.name)
                    if not keep:
                        for name in self._last_uses.get(id(part), ()):
                            kept.maps.take(name)
                if self._comm.members > 1:
                    self._merge_sums(phase, kept)
        results = []
        for name in region.live_out:
            if name in kept.maps:
                value = exchange.own_part(kept.maps, name)
                # What follows may change it in place.
                results.append(value.clone() if name in self._fetched and keep else value.detach())
                if name not in self._fetched:
                    kept.maps.take(name)
            else:
                results.append(kept.known[name].clone())
        return tuple(results), kept

    def _plain_forward(self, module: nn.Module, step: Step, known: Mapping[str, Any]) -> Any:
        """Compute what has no rows."""
        if self.region.nodes[step.name].name not in self._random:
            return self._run_plain(module, step, known)
        return self.context.run_with_rng(lambda: self._run_plain(module, step, known))

    def _run_plain(self, module: nn.Module, step: Step, known: Mapping[str, Any]) -> Any:
        """Compute what has no rows; a change in place is of a copy where the backward pass needs what was changed."""
        if step.name not in self.region.fixed and changes_in_place(module, self.region.nodes[step.name]):
            known = {**known, **{name: known[name].clone() for name in step.others[:1]}}
        return run_plain(module, self.region, step, known)

    def _merge_sums(self, phase: Phase, kept: Kept) -> None:
        """Merge the sums of all members' boxes."""
        for name in phase.sums:
            merge, value = self.region.operations[name].merge, kept.known[name]
            if merge is None:
                kept.known[name] = self._comm.all_reduce(value, False)
            else:
                kept.known[name] = merge(self._comm.all_gather(value, False))

    def _part_forward(self, module: nn.Module, part: PartPlan, kept: Kept) -> None:
        resolve, dtypes = resolver(module, self.region, kept.known), dict[str, torch.dtype]()
        sums: dict[str, list[Tensor]] = {}
        for place, following in zip_longest(part.places, part.places[1:]):
            program = part.program(*place)
            if kept.maps.ahead and following:
                fetch_ahead(part, following, kept.maps, None)
            rows, columns = part.rows[place[0]], part.columns[place[1]]
            fetched = {}
            for name, _ in program.entering:
                fetched[name] = kept.maps.fetch(name, (rows[name], columns[name]))
            for name, value in run_box(module, part, program, place, fetched, kept.known, resolve).items():
                if name in self.region.dims:
                    lines = part.box_spans[name]
                    kept.maps.write(name, (lines[0][place[0]], lines[1][place[1]]), value)
                elif self.region.operations[name].merge:
                    sums.setdefault(name, []).append(value)
                elif name in kept.known:
                    kept.known[name].add_(value)
                else:
                    dtypes[name] = value.dtype
                    kept.known[name] = value.float() if value.dtype in HALVES else value
            del fetched
        for name, dtype in dtypes.items():
            kept.known[name] = kept.known[name].to(dtype)
        for name, values in sums.items():
            merge = self.region.operations[name].merge
            assert merge is not None
            kept.known[name] = merge(values)

    def backward(
        self,
        module: nn.Module,
        kept: Kept,
        gradients: Sequence[Tensor | None],
        parameters: Sequence[Tensor],
        asked: frozenset[str],
    ) -> tuple[dict[str, Tensor | None], list[Tensor | None]]:
        """Return gradients of what enters the region, by name, and of ``parameters``.

        Args:
            gradients: of what leaves, in order.
            asked: names of what enters that a gradient is asked of.
        """
        region, exchange = self.region, self._exchange
        device = next(tensor.device for tensor in (*parameters, *gradients) if tensor is not None)
        back = Gradients(self._maps(device, frozenset(asked)), {}, {})
        for name, gradient in zip(region.live_out, gradients, strict=True):
            if gradient is None:
                continue
            if name in region.dims:
                # Boxes add to it, and autograd may give two maps one gradient. ``put`` copies maps with halos.
                adds = name in self._fetched and name not in exchange.names
                exchange.put(back.maps, name, gradient.clone() if adds else gradient)
            else:
                back.known[name] = gradient
        silent = region.dims.keys() - asked - (region.flows - set(region.inputs))
        for phase in reversed(self.phases):
            if self._comm.members > 1:
                self._sum_gradients_of_sums(phase, kept, back)
            for part in reversed(phase.parts):
                for step in part.live_steps:
                    if step.name in exchange.names and step.name in region.flows:
                        exchange.send_back(back.maps, step.name, kept.maps)
                self._part_backward(module, part, kept, back, silent)
                for step in part.live_steps:
                    kept.maps.take(step.name)
                    back.maps.take(step.name)
            self._plain_backward(module, phase, kept, back)
        found: dict[str, Tensor | None] = {}
        for name in region.inputs:
            if name in exchange.names and name in region.flows:
                exchange.send_back(back.maps, name, kept.maps)
        for name in asked:
            if name in region.dims:
                found[name] = exchange.own_part(back.maps, name) if name in back.maps else None
            else:
                found[name] = back.known.get(name)
        return found, [back.sums.get(parameter) for parameter in parameters]

    def _sum_gradients_of_sums(self, phase: Phase, kept: Kept, back: Gradients) -> None:
        """Sum the gradients that all members have of the sums of a phase."""
        for name in phase.sums:
            if name in self.region.flows:
                gradient = back.known[name] if name in back.known else torch.zeros_like(kept.known[name])
                back.known[name] = self._comm.all_reduce(gradient, False)

    def _part_backward(self, module: nn.Module, part: PartPlan, kept: Kept, back: Gradients, silent: set[str]) -> None:
        region = self.region
        others = dict.fromkeys(name for step in part.steps for name in step.others if name in region.flows)
        known = dict(kept.known)
        leaves = {name: known[name].detach().requires_grad_() for name in others}
        known.update(leaves)
        names = {step.name for step in part.live_steps if step.name in back.maps or step.name in back.known}
        resolve, parameters = resolver(module, region, known), self._parameters(module, part.steps)
        for place, following in zip_longest(part.places, part.places[1:]):
            program = part.program(*place)
            if kept.maps.ahead and following and not names.isdisjoint(part.program(*following).gives):
                fetch_ahead(part, following, kept.maps, back.maps)
            if names.isdisjoint(program.gives):
                continue
            rows, columns = part.rows[place[0]], part.columns[place[1]]
            fetched, sources, inputs = {}, [], []
            for name, _ in program.entering:
                fetched[name] = value = kept.maps.fetch(name, (rows[name], columns[name]))
                if name not in silent:
                    sources.append(name)
                    inputs.append(value.requires_grad_())
            with torch.enable_grad():
                values = run_box(module, part, program, place, fetched, known, resolve, kept.maps)
            outputs, pulled = [], []
            for name, value in values.items():
                if name in names and value.requires_grad:
                    outputs.append(value)
                    if name in region.dims:
                        lines = part.box_spans[name]
                        pulled.append(back.maps.fetch(name, (lines[0][place[0]], lines[1][place[1]])))
                    else:
                        pulled.append(back.known[name])
            del values
            if not outputs:
                continue
            inputs += [*leaves.values(), *parameters]
            found = torch.autograd.grad(outputs, inputs, pulled, allow_unused=True)
            del outputs, pulled, value
            for name, gradient in zip(sources, found, strict=False):
                if gradient is not None:
                    back.maps.add(name, (rows[name], columns[name]), gradient)
            back.count(leaves, parameters, found[len(sources) :])
            del fetched, found, inputs
        back.narrow(leaves)

    def _plain_backward(self, module: nn.Module, phase: Phase, kept: Kept, back: Gradients) -> None:
        """Add the gradients of the steps of a phase that are computed once."""
        steps = [step for step in phase.plain if step.name not in self.region.fixed]
        names = [step.name for step in steps if step.name in back.known]
        if not names:
            return
        made = {step.name for step in steps}
        before = {n: kept.known[n].detach() for step in steps for n in step.others if n not in made}
        leaves = {n: v.requires_grad_() for n, v in before.items() if n in self.region.flows}
        known = {**kept.known, **before}
        with torch.enable_grad():
            for step in steps:
                known[step.name] = self._run_plain(module, step, known)
        names = [name for name in names if known[name].requires_grad]
        if not names:
            return
        outputs, pulled = [known[name] for name in names], [back.known[name] for name in names]
        parameters = self._parameters(module, steps)
        found = torch.autograd.grad(outputs, [*leaves.values(), *parameters], pulled, allow_unused=True)
        back.count(leaves, parameters, found)
        back.narrow(leaves)

    def _parameters(self, module: nn.Module, steps: Iterable[Step]) -> list[nn.Parameter]:
        nodes = self.region.nodes
        found = parameters_of(module, [nodes[step.name] for step in steps if step.name in nodes])
        return [parameter for parameter in found if parameter.requires_grad]
