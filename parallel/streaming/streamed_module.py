"""A model whose tiles are computed box by box as far as possible, and whole from there on."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, fx, nn

from parallel.comm.communicator import Communicator
from parallel.graph.partition import Partition
from parallel.offload.host_memory import HostMemory
from parallel.streaming.box_sums import BoxSums, SummedLoss, beside, with_sums
from parallel.streaming.operation import attribute
from parallel.streaming.read_region import NothingInBoxes, read_region
from parallel.streaming.region import WHOLE_TILE, Region
from parallel.streaming.region_run import Kept, RegionRun
from parallel.streaming.step_record import StepRecord, record, with_record
from parallel.trace.cut import cut_stage
from parallel.trace.stage_module import Boxes, Run, StageModule, compiled, whole
from parallel.trace.trace_alone import trace_alone
from parallel.trace.without_data import ONE_AT_A_TIME


class PlannedRegion:
    """A region in boxes for values of one form, and what follows it.

    Attributes:
        rest: what follows, of the values that ``rest_inputs`` names.
        sums: what leaves the region are sums of what the model gives.
        places: of the tensors that enter the region among the values.
    """

    def __init__(
        self,
        run: RegionRun,
        rest: Run,
        rest_inputs: tuple[str, ...],
        filled: frozenset[str],
        paths: tuple[str, ...],
        read: tuple[fx.Node, ...],
        sums: bool,
        places: tuple[int, ...],
    ) -> None:
        self.run, self.rest, self.rest_inputs, self.sums, self.places = run, rest, rest_inputs, sums, places
        self._filled, self._paths, self._read = filled, paths, read

    def for_rest(self, name: str, value: Any) -> Any:
        """Return a value as what follows takes it: images by boxes are made whole where more than their shape is."""
        if not isinstance(value, Boxes):
            return value
        if name in self._filled:
            return whole(value)
        return torch.empty(value.shape, dtype=value.dtype, device="meta")

    def leaving(self, stage: nn.Module, values: Sequence[Any], beside: Mapping[str, Any]) -> tuple[Tensor, ...]:
        """Compute the region."""
        entering, wants = [values[place] for place in self.places], torch.is_grad_enabled()
        made: tuple[Tensor, ...] = _Streamed.apply(
            self.run, stage, beside, len(entering), wants, *entering, *self.parameters(stage)
        )
        return made

    def parameters(self, stage: nn.Module) -> list[nn.Parameter]:
        """Of the region, those that are trained, each once."""
        found = [p for path in self._paths for p in stage.get_submodule(path).parameters()]
        found += [value for node in self._read if isinstance(value := attribute(stage, node), nn.Parameter)]
        return list({id(p): p for p in found if p.requires_grad}.values())


class _Streamed(torch.autograd.Function):
    """The region as one operation: each parameter has one gradient, given once."""

    @staticmethod
    def forward(
        ctx: Any,
        run: RegionRun,
        stage: nn.Module,
        beside: Mapping[str, Any],
        count: int,
        wants: bool,
        *tensors: Any,
    ) -> Any:
        device = tensors[0].device.type
        ctx.precision = (device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device))
        ctx.run, ctx.stage, ctx.count, ctx.parameters = run, stage, count, tensors[count:]
        ctx.save_for_backward(*ctx.parameters)  # so that autograd refuses those that have changed
        ctx.set_materialize_grads(False)
        region = run.region
        entering = [t.detach() if isinstance(t, Tensor) else t for t in tensors[:count]]
        maps = entering[: len(region.inputs)]
        beside = {**beside, **dict(zip(region.given, entering[len(maps) :], strict=True))}
        with _precision(ctx):
            leaving, kept = run.forward(stage, maps, wants, beside)
        ctx.kept = kept if wants else None
        silent = [value for name, value in zip(region.leaving, leaving, strict=True) if name not in region.flows]
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
    """That of the forward pass. Casts are not remembered, or those made without gradients would be used with them."""
    device, dtype, enabled = ctx.precision
    return torch.autocast(device, dtype, enabled=enabled, cache_enabled=False)


MOST_PLANS = 64
"""Kept of shapes that came before, as whole slides are hardly ever of one size; a plan takes seconds, and a few MiB."""


def streamed(
    module: nn.Module,
    box: int,
    shape: tuple[int, ...],
    communicator: Communicator,
    stored_bytes: int | None = None,
    host: HostMemory | None = None,
) -> StreamedModule:
    """Return ``module`` computed in boxes of ``box`` px, with the names it has.

    Args:
        shape: (n, 3, h, w) of a usual microbatch; others may follow.
        communicator: all ranks; each calls it.
        stored_bytes, host: as for ``RegionRun``.

    Raises:
        ValueError: the model cannot be traced, or not be computed in boxes to where it has no rows any more; which
            layer, why, and what to do.
    """
    traced = trace_alone(module, shape, communicator)
    stage = cut_stage(traced, Partition(traced.graph, (0,)), 0, (), StreamedModule)
    assert isinstance(stage, StreamedModule)
    ends = stage.inputs, stage.outputs
    training, evaluation = (list(each.graph.nodes) for each in (traced.training, traced.evaluation))
    run = StreamedRun(training, *ends, box, stored_bytes, host=host, updated=traced.updated)
    stage._run_training, stage._run_evaluation = run, StreamedRun(evaluation, *ends, box, stored_bytes, host=host)
    parameter = next(module.parameters())
    example = torch.zeros((), dtype=parameter.dtype.to_real(), device=parameter.device).expand(shape)
    stage.train()
    run.planned(stage, (example,))  # what is wrong is said now
    stage.train(module.training)
    return stage


class StreamedStage(StageModule):
    """A stage computed in boxes of the tile as far as possible."""

    gives_sums = True

    def tiles(self, images: Tensor | Boxes, shape: tuple[int, ...]) -> Any:
        """Return the tiles, of which the stage asks for boxes."""
        return images

    def loss(self, run: Any, loss: Any, values: Iterable[Any], targets: Any) -> Tensor:
        """Return the ``loss``, box by box where it is made of sums."""
        if not isinstance(loss, SummedLoss):
            return super().loss(run, loss, values, targets)
        asked = BoxSums(loss.sums, targets)
        return loss.value(run(*values, sums=asked), asked.pixels)

    def sums(self, values: Sequence[Any], asked: BoxSums) -> Tensor | None:
        """Return the sums that are asked of the output."""
        summed: Tensor = self(*values, sums=asked)
        return summed

    def forward(self, *values: Any, sums: BoxSums | None = None) -> Any:
        """Return the values named in ``outputs``; or the ``sums`` of the only one, box by box where it has the rows of
        the tile."""
        if sums is None:
            return super().forward(*values)
        run = self._run_training if self.training else self._run_evaluation
        assert isinstance(run, StreamedRun)
        return run.sums(self, sums, *values)


class StreamedModule(StreamedStage):
    """A model computed in boxes of the tile as far as possible."""

    def forward(self, *values: Any, sums: BoxSums | None = None) -> Any:
        """Return the model's output, or the ``sums`` of it."""
        given = super().forward(*values, sums=sums)
        return given[0] if sums is None else given


class StreamedRun:
    """Runs nodes of a traced model: a region in boxes, and what follows it whole; all of it whole where no region is.

    Args:
        nodes: in order.
        inputs, outputs: names of the values that enter and leave.
        box: side of the boxes, px of the tile.
        stored_bytes, scale, host: as for ``RegionRun``.
        updated: paths of the buffers that forward passes of training update.
    """

    def __init__(
        self,
        nodes: Sequence[fx.Node],
        inputs: tuple[str, ...],
        outputs: tuple[str, ...],
        box: int,
        stored_bytes: int | None = None,
        scale: tuple[Fraction, Fraction] = WHOLE_TILE,
        host: HostMemory | None = None,
        updated: Collection[str] = (),
    ) -> None:
        self._updated = updated
        self._nodes, self._inputs, self._outputs = nodes, inputs, outputs
        self._box, self._stored_bytes, self._scale, self._host = box, stored_bytes, scale, host
        self._plans: dict[Any, PlannedRegion | NothingInBoxes] = {}
        self._records: dict[str, StepRecord] = {}
        self._whole = compiled(nodes, inputs, outputs, {}, "a stage without boxes")

    def __call__(self, stage: nn.Module, *values: Any) -> tuple[Any, ...]:
        try:
            plan = self.planned(stage, values)
        except NothingInBoxes:
            return self._whole(stage, *(whole(value) if isinstance(value, Boxes) else value for value in values))
        leaving = plan.leaving(stage, values, {})
        by_name: dict[str, Any] = {**dict(zip(self._inputs, values, strict=True)), **plan.run.region.constants}
        by_name |= dict(zip(plan.run.region.leaving, leaving, strict=True))
        return plan.rest(stage, *(plan.for_rest(name, by_name[name]) for name in plan.rest_inputs))

    def sums(self, stage: nn.Module, asked: BoxSums, *values: Any) -> Tensor:
        """Return the sums (n, K) that are asked of the only value given; box by box where it has the targets' rows."""
        with contextlib.suppress(NothingInBoxes):
            plan = self.planned(stage, values, asked.targets.shape)
            if plan.sums:
                (sums,) = plan.leaving(stage, values, beside(plan.run.region, asked))
                return sums
        (output,) = self(stage, *values)
        return asked.of_whole(output)

    def planned_boxes(self, stage: nn.Module, region: Region) -> RegionRun:
        """Return the region, planned."""
        return RegionRun(region, self._box, self._stored_bytes, self._scale, self._host)

    def planned(self, stage: nn.Module, values: Sequence[Any], targets: Sequence[int] = ()) -> PlannedRegion:
        """The plan for values of these shapes and types.

        Args:
            targets: shape of those that sums are asked with.

        Raises:
            ValueError: as ``read_region``.
        """
        key = tuple(map(_form, values)), tuple(targets)
        try:
            plan = self._plans.pop(key, None) or self._plan(stage, values, targets)
        except NothingInBoxes as reason:
            plan = reason
        self._plans[key] = plan
        if len(self._plans) > MOST_PLANS:
            del self._plans[next(iter(self._plans))]  # the one that was used longest ago
        if isinstance(plan, NothingInBoxes):
            raise plan.with_traceback(None)
        return plan

    def _plan(self, stage: nn.Module, values: Sequence[Any], targets: Sequence[int]) -> PlannedRegion:
        entering, given = parted(dict(zip(self._inputs, values, strict=True)))
        updated = self._updated if stage.training else ()
        region = read_region(stage, self._nodes, entering, given, updated=updated)
        return self.of_region(stage, region, targets) or self.planned(stage, values)

    def of_region(self, stage: nn.Module, region: Region, targets: Sequence[int]) -> PlannedRegion | None:
        """Return the plan of ``region``, of the nodes; None where what leaves it is not what sums are asked of."""
        with ONE_AT_A_TIME:
            self._records = self._records or record(stage, region)
        tiles = region.forms[region.inputs[0]][0][0]
        region = replace(region, steps=with_record(region.steps, self._records, tiles))
        if targets:
            summed = with_sums(region, self._nodes, targets)
            if summed is None:
                return None
            region = summed
        made = {step.name for step in region.steps}.union(region.constants, self._inputs)
        rest = [node for node in self._nodes if node.name not in made and node.op != "get_attr" and not targets]
        used = {argument.name for node in rest for argument in node.all_input_nodes}.union(self._outputs)
        constants = [node for node in self._nodes if node.op == "get_attr" and node.name in used]
        inputs = tuple(n for n in dict.fromkeys((*region.leaving, *region.constants, *self._inputs)) if n in used)
        run = compiled([*constants, *rest], inputs, () if targets else self._outputs, {}, "what follows boxes")
        paths = dict.fromkeys(
            str(region.nodes[step.name].target)
            for step in region.steps
            if step.name in region.nodes and region.nodes[step.name].op == "call_module"
        )
        read = {
            argument: None
            for step in region.steps
            if step.name in region.nodes
            for argument in region.nodes[step.name].all_input_nodes
            if argument.op == "get_attr"
        }
        filled = {argument.name for node in rest if not _takes_shape(node) for argument in node.all_input_nodes}
        return PlannedRegion(
            self.planned_boxes(stage, region),
            run,
            inputs,
            frozenset(filled.union(self._outputs)),
            tuple(paths),
            tuple(read),
            bool(targets),
            tuple(self._inputs.index(name) for name in (*region.inputs, *region.given)),
        )


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
