"""Run the nodes of a stage box by box as far as possible, and whole from there on: on one member of a team.

A rank alone is a team of one. Its region is read from the values that enter the stage, so that a stage can be computed
in boxes after one that cannot; the members of a team share the region that was read for the whole model.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from parallel.space.rule import Step
from parallel.space.team import TeamGrid
from parallel.streaming.box_sums import ASKED, BoxSums, with_sums
from parallel.streaming.operation import parameters_of
from parallel.streaming.read_region import NothingTileable, read_region
from parallel.streaming.region import Region
from parallel.streaming.step_record import StepRecord, record, with_record
from parallel.team.program import NodeRun
from parallel.team.region_run import Kept, RegionRun
from parallel.team.team_comm import ForwardContext, TeamComm
from parallel.team.team_plan import BoxedParts, TeamPlan
from parallel.trace.stage_module import Boxes, as_tensor
from parallel.trace.without_data import ONE_AT_A_TIME


@dataclass(frozen=True, eq=False)
class PlannedRegion:
    """A region in boxes for values of one form, and what follows it.

    Attributes:
        rest: runs what follows, of the values that ``rest_inputs`` names.
        filled: names of the values of which what follows takes more than their shape.
        sums: what leaves the region are sums of what the model gives.
        nodes: of the region.
    """

    run: RegionRun
    rest: NodeRun
    rest_inputs: tuple[str, ...]
    filled: frozenset[str]
    sums: bool
    nodes: tuple[fx.Node, ...]

    def leaving(
        self, stage: nn.Module, context: ForwardContext, known: Mapping[str, Any], others: Mapping[str, Any]
    ) -> tuple[Tensor, ...]:
        """Compute the region, of the values that are ``known`` by name."""
        region, wants = self.run.region, torch.is_grad_enabled()
        self.run.context = context
        entering = [known[name] for name in (*region.inputs, *region.given)]
        trained = [parameter for parameter in parameters_of(stage, self.nodes) if parameter.requires_grad]
        values: tuple[Tensor, ...] = _InBoxes.apply(self.run, stage, others, len(entering), wants, *entering, *trained)
        return values

    def for_rest(self, name: str, value: Any) -> Any:
        """Return a value as what follows takes it: images by boxes are made whole where more than their shape is."""
        if isinstance(value, Tensor) or not isinstance(value, Boxes):
            return value
        return as_tensor(value) if name in self.filled else torch.empty(value.shape, dtype=value.dtype, device="meta")


class _InBoxes(torch.autograd.Function):
    """The region as one operation: each parameter has one gradient, given once."""

    @staticmethod
    def forward(
        ctx: Any, run: RegionRun, stage: nn.Module, others: Mapping[str, Any], count: int, wants: bool, *tensors: Any
    ) -> Any:
        device = tensors[0].device.type
        ctx.precision = (device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device))
        ctx.run, ctx.stage, ctx.parameters = run, stage, tensors[count:]
        ctx.save_for_backward(*ctx.parameters)  # so that autograd refuses those that have changed
        ctx.set_materialize_grads(False)
        region = run.region
        entering = [t.detach() if isinstance(t, Tensor) else t for t in tensors[:count]]
        maps = entering[: len(region.inputs)]
        others = {**others, **dict(zip(region.given, entering[len(maps) :], strict=True))}
        with _precision(ctx):
            leaving, kept = run.forward(stage, maps, wants, others)
        ctx.kept = kept if wants else None
        silent = [value for name, value in zip(region.live_out, leaving, strict=True) if name not in region.flows]
        ctx.mark_non_differentiable(*silent)
        return leaving

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        kept: Kept | None = ctx.kept
        if kept is None:
            raise RuntimeError("a tile computed box by box goes back once")
        _, ctx.kept = ctx.saved_tensors, None
        run: RegionRun = ctx.run
        names = (*run.region.inputs, *run.region.given)
        asked = frozenset(name for k, name in enumerate(names) if ctx.needs_input_grad[5 + k])
        with _precision(ctx):
            entering, parameters = run.backward(ctx.stage, kept, gradients, ctx.parameters, asked)
        return (None, None, None, None, None, *(entering.get(name) for name in names), *parameters)


def _precision(ctx: Any) -> torch.autocast:
    """Return the autocast of the forward pass, without its cache: casts made without gradients would be reused."""
    device, dtype, enabled = ctx.precision
    return torch.autocast(device, dtype, enabled=enabled, cache_enabled=False)


class BoxedNodes(NodeRun):
    """Nodes of a stage, of which those in the region are computed box by box.

    Args:
        grid, comm: of the team.
        device: of the stage; a team's region was read before the model was moved there.
        updated: paths of the buffers that forward passes of training update.
    """

    def __init__(
        self,
        nodes: Sequence[fx.Node],
        inputs: tuple[str, ...],
        outputs: tuple[str, ...],
        random: Collection[str],
        boxed: BoxedParts,
        grid: TeamGrid,
        comm: TeamComm,
        device: torch.device,
        updated: Collection[str] = (),
    ) -> None:
        super().__init__(nodes, inputs, outputs, random)
        self._boxed, self._grid, self._comm, self._device, self._updated = boxed, grid, comm, device, updated
        self._records: dict[str, StepRecord] = {}

    def run(
        self, stage: nn.Module, context: ForwardContext, values: Sequence[Any], asked: BoxSums | None = None
    ) -> tuple[Any, ...]:
        planned = self.planned(stage, context.plan, values, () if asked is None else tuple(asked.targets.shape))
        if isinstance(planned, NothingTileable):
            whole = [as_tensor(v) if not isinstance(v, Tensor) and isinstance(v, Boxes) else v for v in values]
            return super().run(stage, context, whole, asked)
        known = dict(zip(self._inputs, values, strict=True))
        region = planned.run.region
        sums = {region.nodes[region.steps[-1].name].name + ASKED: asked} if asked and planned.sums else {}
        leaving = planned.leaving(stage, context, known, sums)
        if planned.sums:
            return leaving
        known.update(zip(region.live_out, leaving, strict=True))
        rest = [planned.for_rest(name, known[name]) for name in planned.rest_inputs]
        return planned.rest.run(stage, context, rest, asked)

    def planned(
        self, stage: nn.Module, plan: TeamPlan, values: Sequence[Any], targets: tuple[int, ...] = ()
    ) -> PlannedRegion | NothingTileable:
        """Return what is computed box by box, planned for tiles as ``plan`` is, or why nothing is.

        Args:
            values: that enter; of a rank alone the plan depends on their forms.
            targets: shape of those that sums are asked with.
        """
        key = (self, targets, *map(_form, values)) if self._comm.members == 1 else (self, targets)
        if key not in plan.compiled:
            plan.compiled[key] = self._plan(stage, plan, values, targets)
        planned: PlannedRegion | NothingTileable = plan.compiled[key]
        return planned

    def _plan(
        self, stage: nn.Module, plan: TeamPlan, values: Sequence[Any], targets: tuple[int, ...]
    ) -> PlannedRegion | NothingTileable:
        try:
            region = self._region(stage, plan, values)
        except NothingTileable as reason:
            return reason.with_traceback(None)
        with ONE_AT_A_TIME:
            self._records = self._records or record(stage, region)
        tiles = region.forms[region.inputs[0]][0][0]
        region = replace(region, steps=with_record(region.steps, self._records, tiles))
        if targets:
            summed = with_sums(region, self._nodes, targets)
            if summed is None:
                return self.planned(stage, plan, values)
            region = summed
        run = RegionRun(region, self._boxed, self._grid, self._comm, side=plan.mesh.side, random=self._random)
        made = {step.name for step in region.steps}.union(region.constants)
        rest = [node for node in self._nodes if node.name not in made and not targets]
        used = {argument.name for node in rest for argument in node.all_input_nodes}.union(self._outputs)
        inputs = tuple(name for name in dict.fromkeys((*self._inputs, *region.live_out)) if name in used)
        filled = {argument.name for node in rest if not _takes_shape(node) for argument in node.all_input_nodes}
        nodes = dict.fromkeys(region.nodes[step.name] for step in region.steps if step.name in region.nodes)
        return PlannedRegion(
            run,
            NodeRun(rest, inputs, self._outputs, self._random, region.constants),
            inputs,
            frozenset(filled.union(self._outputs)),
            bool(targets),
            tuple(nodes),
        )

    def _region(self, stage: nn.Module, plan: TeamPlan, values: Sequence[Any]) -> Region:
        """Return the region of the nodes, on the device of the stage."""
        if self._comm.members == 1:
            maps, others = parted(dict(zip(self._inputs, values, strict=True)))
            updated = self._updated if stage.training else ()
            return read_region(stage, self._nodes, maps, others, updated=updated, random=self._random)
        region = None if plan.region is None else region_of_stage(plan.region, self._nodes, self._inputs)
        if region is None:
            raise NothingTileable(*(plan.ends_at or ("the model", "has no layer that takes maps")))
        forms = {name: (*form[:2], self._device) for name, form in region.forms.items()}
        constants = {n: self._device if isinstance(v, torch.device) else v for n, v in region.constants.items()}
        return replace(region, forms=forms, constants=constants)


def region_of_stage(region: Region, nodes: Iterable[fx.Node], inputs: Sequence[str]) -> Region | None:
    """Return what ``nodes`` compute of a region; None where they compute no map of it.

    Args:
        inputs: names of the values that enter the stage.

    Raises:
        ValueError: several maps, or several tensors, pass between stages as one value.
    """
    here = {node.name for node in nodes if node.op not in ("placeholder", "get_attr")}
    steps = tuple(step for step in region.steps if region.nodes[step.name].name in here)
    if not any(step.flops and not step.sums for step in steps):
        return None
    made = {step.name for step in steps}
    maps = {name for step in steps for name in step.maps} - made
    others = {name for step in steps for name in step.others} - made
    leaving = tuple(step.name for step in steps if _leaves(region, step, made))
    passing = sorted(maps | {name for name in leaving if name in region.dims})
    for name, forms in [*((n, region.forms) for n in passing), *((n, region.pooled) for n in sorted(others))]:
        if name not in forms:
            raise ValueError(
                f"--stream: {name} is several {'maps' if name in region.dims else 'tensors'}, which pass from stage to "
                "stage together: cut the model elsewhere (--cuts)"
            )
    given = tuple(name for name in inputs if name in others)
    return replace(
        region,
        steps=steps,
        forms={**region.forms, **{name: region.pooled[name] for name in given}},
        live_out=leaving,
        inputs=tuple(name for name in inputs if name in maps),
        given=given,
    )


def _leaves(region: Region, step: Step, made: Collection[str]) -> bool:
    """Return whether nodes that follow, here or in a later stage, use the value of a step."""
    node = region.nodes[step.name]
    inside = {*made, *region.constants}
    return node.name == step.name and any(user.name not in inside for user in node.users)


def _form(value: Any) -> Any:
    """Return what a plan depends on."""
    if isinstance(value, Tensor | Boxes):
        return tuple(value.shape), value.dtype, value.device, isinstance(value, Tensor) and value.requires_grad
    return value if isinstance(value, (int, float, str, type(None))) else None


def parted(values: Mapping[Any, Any]) -> tuple[dict[Any, Tensor | Boxes], dict[Any, Any]]:
    """Return the maps among what enters, and all else: what an earlier stage pooled has no rows."""
    maps = {
        name: value
        for name, value in values.items()
        if isinstance(value, Tensor | Boxes)
        and len(value.shape) == 4
        and value.dtype.is_floating_point
        and tuple(value.shape[2:]) != (1, 1)
    }
    return maps, {name: value for name, value in values.items() if name not in maps}


def _takes_shape(node: fx.Node) -> bool:
    """A node takes nothing but the shape of its tensor."""
    if node.op == "call_method":
        return node.target == "size"
    return bool(node.target is getattr and node.args[1] == "shape")
