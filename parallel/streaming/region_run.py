"""A region computed box by box, forward and back: exact gradients, as sums over boxes of what each box gives.

The boxes of a part are a partition of what it gives, so that the loss is a function of all of them together and each
box's backward pass gives its share: of parameters, of values without rows, and of the maps that the part fetched, where
rims of neighbouring boxes add up. Nothing is kept between the passes but maps and sums (Chen et al. 2016 over depth;
Pinckaers et al. 2020 over space, in one part and without maps).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import zip_longest
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from parallel.offload.copies import Copies
from parallel.offload.host_memory import HostMemory
from parallel.space.box_bytes import Cuts
from parallel.space.boxes import Boxes as PlannedBoxes
from parallel.space.boxes import StreamedModel, plan_boxes
from parallel.space.parts import Part
from parallel.space.rule import Step
from parallel.streaming.maps import Maps
from parallel.streaming.part_plan import PartPlan, plan_part
from parallel.streaming.part_run import fetch_ahead, fetch_box, resolver, run_box, run_plain
from parallel.streaming.patch import Box
from parallel.streaming.region import WHOLE_TILE, Region
from parallel.streaming.strip_maps import StripMaps, column_cuts

NOTHING: Mapping[str, Box] = MappingProxyType({})


@dataclass(frozen=True)
class Phase:
    """What can be computed once all sums before it are known."""

    plain: tuple[Step, ...]
    parts: tuple[PartPlan, ...]


@dataclass
class Kept:
    """What a forward pass leaves for the backward pass."""

    maps: Maps
    known: dict[str, Any]


class RegionRun:
    """A region planned for tiles of one size.

    Args:
        region: as it was read.
        box: side of the boxes, px.
        stored_bytes: that maps between parts should take, where the sums in the model do not ask for more; None: 32
            for each px of the tile.
        scale: rows and columns of the tile for each of the largest map that enters.
        host: where maps are; None: in memory.

    Attributes:
        phases: in order.

    Raises:
        ValueError: a value of several maps is used on both sides of a sum.
    """

    def __init__(
        self,
        region: Region,
        box: int,
        stored_bytes: int | None = None,
        scale: tuple[Fraction, Fraction] = WHOLE_TILE,
        host: HostMemory | None = None,
    ) -> None:
        self.region = region
        self._host = host
        self.boxes = self.planned(region.on_paper(scale), box, stored_bytes)
        self.phases = [
            Phase(
                phase.plain,
                tuple(plan_part(region, phase.steps, part, phase.leaving, *self.cuts(part)) for part in phase.parts),
            )
            for phase in self.boxes.phases
        ]
        self._shapes = {name: shape for name, (shape, _, _) in region.forms.items()}
        self._cuts = column_cuts(part for phase in self.phases for part in phase.parts)
        self._last_uses = self._find_last_uses()

    def planned(self, model: StreamedModel, box: int, stored_bytes: int | None) -> PlannedBoxes:
        """Return the region in boxes, on paper."""
        return plan_boxes(model, box, stored_bytes)

    def cuts(self, part: Part) -> tuple[Cuts, tuple[range, range] | None]:
        """Where the boxes of a part begin and end, and which of them are computed here; None: all."""
        return self.boxes.cuts(part), None

    def maps(self, device: torch.device, here: frozenset[str]) -> Maps:
        """Return where maps between parts, or their gradients, are kept."""
        return self._maps(device, here)

    def _maps(self, device: torch.device, here: frozenset[str], held: Mapping[str, Box] = NOTHING) -> Maps:
        self._host = self._host or HostMemory(Copies.for_device(device))
        forms = self._shapes, self.region.dims, device, self._host, here, held
        return Maps(*forms) if self._host.copies.at_once else StripMaps(*forms, cuts=self._cuts)

    def enter(self, maps: Maps, name: str, value: Any) -> None:
        """Take a map that enters."""
        maps.put(name, value)

    def plain(self, module: nn.Module, step: Step, known: Mapping[str, Any]) -> Any:
        """Compute what has no rows, in the forward pass."""
        return run_plain(module, self.region, step, known)

    def leave(self, maps: Maps, name: str) -> Tensor:
        """Return a map that leaves."""
        return maps.whole(name)

    def enter_gradient(self, maps: Maps, name: str, gradient: Tensor) -> None:
        """Take the gradient of a map that leaves."""
        maps.put(name, gradient)

    def after_part(self, part: PartPlan, kept: Kept) -> None:
        """The boxes of a part have given all that they give."""

    def after_phase(self, phase: Phase, kept: Kept) -> None:
        """The sums of a phase are those of all boxes here."""

    def before_phase_backward(self, phase: Phase, kept: Kept, back: Gradients) -> None:
        """The gradients of the sums of a phase are those of all that uses them here."""

    def before_part_backward(self, part: PartPlan, kept: Kept, back: Gradients) -> None:
        """The gradients of what a part gives are those of all that uses it here."""

    def after_backward(self, kept: Kept, back: Gradients) -> None:
        """The gradients of what entered are those of all that used it here."""

    def leave_gradient(self, maps: Maps, name: str) -> Tensor | None:
        """Return the gradient of a map that entered."""
        return maps.take(name)

    def forward(
        self, module: nn.Module, entering: Sequence[Any], keep: bool, beside: Mapping[str, Any]
    ) -> tuple[tuple[Tensor, ...], Kept]:
        """Return what leaves the region, in order, and what its backward pass needs.

        Args:
            keep: there will be one.
            beside: what else enters, and steps are computed with, by name.
        """
        region, device = self.region, entering[0].device
        kept = Kept(self.maps(device, frozenset(region.leaving)), dict(beside))
        for name, value in zip(region.inputs, entering, strict=True):
            self.enter(kept.maps, name, value)
        with torch.no_grad():
            for phase in self.phases:
                for step in phase.plain:
                    kept.known[step.name] = self.plain(module, step, kept.known)
                for part in phase.parts:
                    self._part_forward(module, part, kept)
                    self.after_part(part, kept)
                    if not keep:
                        for name in self._last_uses.get(id(part), ()):
                            kept.maps.take(name)
                self.after_phase(phase, kept)
        results = []
        for name in region.leaving:
            if name in kept.maps:
                used_again = any(name in part.entering for phase in self.phases for part in phase.parts)
                value = self.leave(kept.maps, name)
                # What follows may change it in place.
                results.append(value.clone() if used_again and keep else value.detach())
                if not used_again:
                    kept.maps.take(name)
            else:
                results.append(kept.known[name].clone())
        return tuple(results), kept

    def _part_forward(self, module: nn.Module, part: PartPlan, kept: Kept) -> None:
        resolve = resolver(module, self.region, kept.known)
        for place, following in zip_longest(part.places, part.places[1:]):
            program = part.program(*place)
            if kept.maps.ahead and following:
                fetch_ahead(part, following, kept.maps, None)
            fetched = fetch_box(part, program, place, kept.maps)
            for name, value in run_box(module, part, program, place, fetched, kept.known, resolve).items():
                if name in self.region.dims:
                    kept.maps.write(name, part.box(name, *place), value)
                elif name in kept.known:
                    merge = self.region.operations[name].merge
                    kept.known[name] = merge(kept.known[name], value) if merge else kept.known[name].add_(value)
                else:
                    kept.known[name] = value
            del fetched

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
        region = self.region
        device = next(tensor.device for tensor in (*parameters, *gradients) if tensor is not None)
        back = Gradients(
            self.maps(device, frozenset(asked)),
            {},
            list(parameters),
            [None] * len(parameters),
        )
        for name, gradient in zip(region.leaving, gradients, strict=True):
            if gradient is None:
                continue
            if name in region.dims:
                self.enter_gradient(back.maps, name, gradient)
            else:
                back.known[name] = gradient
        silent = {name for name in region.inputs if name not in asked}
        for phase in reversed(self.phases):
            self.before_phase_backward(phase, kept, back)
            for part in reversed(phase.parts):
                self.before_part_backward(part, kept, back)
                self._part_backward(module, part, kept, back, silent)
                for step in part.given:
                    kept.maps.take(step.name)
                    back.maps.take(step.name)
            self._plain_backward(module, phase, kept, back)
        self.after_backward(kept, back)
        found = {
            name: self.leave_gradient(back.maps, name) if name in region.dims else back.known.get(name)
            for name in asked
        }
        return found, back.sums

    def _part_backward(self, module: nn.Module, part: PartPlan, kept: Kept, back: Gradients, silent: set[str]) -> None:
        region = self.region
        others = dict.fromkeys(name for step in part.steps for name in step.others if name not in region.fixed)
        known = dict(kept.known)
        leaves = {name: known[name].detach().requires_grad_() for name in others}
        known.update(leaves)
        names = {step.name for step in part.given if step.name in back.maps or step.name in back.known}
        resolve = resolver(module, region, known)
        for place, following in zip_longest(part.places, part.places[1:]):
            program = part.program(*place)
            if kept.maps.ahead and following and not names.isdisjoint(part.program(*following).gives):
                fetch_ahead(part, following, kept.maps, back.maps)
            if names.isdisjoint(program.gives):
                continue
            fetched = fetch_box(part, program, place, kept.maps)
            sources, inputs = [], []
            for name, value in fetched.items():
                if name not in silent:
                    sources.append(name)
                    inputs.append(value.requires_grad_())
            with torch.enable_grad():
                values = run_box(module, part, program, place, fetched, known, resolve, kept.maps)
            outputs, pulled = [], []
            for name, value in values.items():
                if name in names and value.requires_grad:
                    outputs.append(value)
                    is_map = name in region.dims
                    pulled.append(back.maps.fetch(name, part.box(name, *place)) if is_map else back.known[name])
            del values
            if not outputs:
                continue
            inputs += [*leaves.values(), *back.parameters]
            found = torch.autograd.grad(outputs, inputs, pulled, allow_unused=True)
            del outputs, pulled, value
            rows, columns = part.rows[place[0]], part.columns[place[1]]
            for name, gradient in zip(sources, found, strict=False):
                if gradient is not None:
                    back.maps.add(name, (rows[name], columns[name]), gradient)
            back.count(leaves, found[len(sources) :])
            del fetched, found, inputs

    def _plain_backward(self, module: nn.Module, phase: Phase, kept: Kept, back: Gradients) -> None:
        """Of what is computed once: all of a phase together."""
        steps = [step for step in phase.plain if step.name not in self.region.fixed]
        names = [step.name for step in steps if step.name in back.known]
        if not names:
            return
        made = {step.name for step in steps}
        before = {n: kept.known[n].detach() for step in steps for n in step.others if n not in made}
        leaves = {n: v.requires_grad_() for n, v in before.items() if n not in self.region.fixed}
        known = {**kept.known, **before}
        with torch.enable_grad():
            for step in steps:
                known[step.name] = run_plain(module, self.region, step, known)
        names = [name for name in names if known[name].requires_grad]
        outputs, pulled = [known[name] for name in names], [back.known[name] for name in names]
        found = torch.autograd.grad(outputs, [*leaves.values(), *back.parameters], pulled, allow_unused=True)
        back.count(leaves, found)

    def _find_last_uses(self) -> dict[int, list[str]]:
        """By part: the maps that no later part fetches."""
        last: dict[str, PartPlan] = {}
        for phase in self.phases:
            for part in phase.parts:
                last |= dict.fromkeys(part.entering, part)
        found: dict[int, list[str]] = {}
        for name, part in last.items():
            if name not in self.region.leaving:
                found.setdefault(id(part), []).append(name)
        return found


@dataclass
class Gradients:
    """Gradients that add up while boxes go back.

    Attributes:
        maps: of maps.
        known: of values without rows.
        parameters: whose gradients are summed in ``sums``.
    """

    maps: Maps
    known: dict[str, Tensor]
    parameters: list[Tensor]
    sums: list[Tensor | None]

    def count(self, leaves: Mapping[str, Tensor], gradients: Sequence[Tensor | None]) -> None:
        """Add ``gradients``: of ``leaves``, and then of the parameters."""
        for name, gradient in zip(leaves, gradients, strict=False):
            if gradient is not None:
                self.known[name] = self.known[name] + gradient if name in self.known else gradient
        for k, gradient in enumerate(gradients[len(leaves) :]):
            if gradient is not None:
                before = self.sums[k]
                # A copy: autograd may give two parameters one tensor.
                self.sums[k] = gradient.clone() if before is None else before.add_(gradient)
