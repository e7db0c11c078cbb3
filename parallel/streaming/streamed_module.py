"""A model whose tiles are computed box by box as far as possible, and whole from there on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from parallel.comm.communicator import Communicator
from parallel.graph.partition import Partition
from parallel.streaming.box_sums import BoxSums, beside, with_sums
from parallel.streaming.images import Boxes, whole
from parallel.streaming.operation import attribute
from parallel.streaming.region import read_region
from parallel.streaming.region_run import Kept, RegionRun
from parallel.streaming.step_record import StepRecord, record, with_record
from parallel.trace.cut import cut_stage
from parallel.trace.stage_code import compiled
from parallel.trace.stage_module import Run, WholeModule
from parallel.trace.trace_alone import trace_alone

MOST_PLANS = 64
"""Kept of shapes that came before, as whole slides are hardly ever of one size; a plan takes seconds, and a few MiB."""


def streamed(
    module: nn.Module,
    box: int,
    shape: tuple[int, ...],
    communicator: Communicator,
    stored_bytes: int | None = None,
) -> StreamedModule:
    """Return ``module`` computed in boxes of ``box`` px, with the names it has.

    Args:
        shape: (n, 3, h, w) of a usual microbatch; others may follow.
        communicator: all ranks; each calls it.
        stored_bytes: as for ``RegionRun``.

    Raises:
        ValueError: the model cannot be traced, or not be computed in boxes to where it has no rows any more; which
            layer, why, and what to do.
    """
    traced = trace_alone(module, shape, communicator)
    stage = cut_stage(traced, Partition(traced.graph, (0,)), 0, (), StreamedModule)
    assert isinstance(stage, StreamedModule)
    ends = stage.inputs, stage.outputs
    training, evaluation = (list(each.graph.nodes) for each in (traced.training, traced.evaluation))
    run = StreamedRun(training, *ends, box, stored_bytes)
    stage._run_training, stage._run_evaluation = run, StreamedRun(evaluation, *ends, box, stored_bytes)
    parameter = next(module.parameters())
    example = torch.zeros((), dtype=parameter.dtype.to_real(), device=parameter.device).expand(shape)
    stage.train()
    run.planned(stage, (example,))  # what is wrong is said now
    stage.train(module.training)
    return stage


class StreamedModule(WholeModule):
    """A model computed in boxes of the tile as far as possible."""

    def forward(self, *values: Any, sums: BoxSums | None = None) -> Any:
        """Return the model's output, or the ``sums`` of it, box by box where the output has the rows of the tile."""
        if sums is None:
            return super().forward(*values)
        run = self._run_training if self.training else self._run_evaluation
        assert isinstance(run, StreamedRun)
        return run.sums(self, sums, *values)


class StreamedRun:
    """Runs nodes of a traced model: a region in boxes, and what follows it whole.

    Args:
        nodes: in order.
        inputs, outputs: names of the values that enter and leave.
        box: side of the boxes, px.
        stored_bytes: as for ``RegionRun``.
    """

    def __init__(
        self,
        nodes: Sequence[fx.Node],
        inputs: tuple[str, ...],
        outputs: tuple[str, ...],
        box: int,
        stored_bytes: int | None = None,
    ) -> None:
        self._nodes, self._inputs, self._outputs = nodes, inputs, outputs
        self._box, self._stored_bytes = box, stored_bytes
        self._plans: dict[Any, _Planned] = {}
        self._records: dict[str, StepRecord] = {}

    def __call__(self, stage: nn.Module, *values: Any) -> tuple[Any, ...]:
        plan = self.planned(stage, values)
        leaving = plan.leaving(stage, values, {})
        by_name: dict[str, Any] = {**dict(zip(self._inputs, values, strict=True)), **plan.run.region.constants}
        by_name |= dict(zip(plan.run.region.leaving, leaving, strict=True))
        return plan.rest(stage, *(plan.for_rest(name, by_name[name]) for name in plan.rest_inputs))

    def sums(self, stage: nn.Module, asked: BoxSums, *values: Any) -> Tensor:
        """Return the sums (n, K) that are asked of the only value given; box by box where it has the targets' rows."""
        plan = self.planned(stage, values, asked.targets.shape)
        if not plan.sums:
            (output,) = self(stage, *values)
            return asked.of_whole(output)
        (sums,) = plan.leaving(stage, values, beside(plan.run.region, asked))
        return sums

    def planned(self, stage: nn.Module, values: Sequence[Any], targets: Sequence[int] = ()) -> _Planned:
        """The plan for values of these shapes and types.

        Args:
            targets: shape of those that sums are asked with.

        Raises:
            ValueError: as ``read_region``.
        """
        form = tuple((tuple(v.shape), v.dtype, v.device) if isinstance(v, Tensor | Boxes) else None for v in values)
        key = form, tuple(targets)
        self._plans[key] = plan = self._plans.pop(key, None) or self._plan(stage, values, targets)
        if len(self._plans) > MOST_PLANS:
            del self._plans[next(iter(self._plans))]  # the one that was used longest ago
        return plan

    def _plan(self, stage: nn.Module, values: Sequence[Any], targets: Sequence[int]) -> _Planned:
        entering = {name: value for name, value in zip(self._inputs, values, strict=True) if _is_map(value)}
        region = read_region(stage, self._nodes, entering)
        self._records = self._records or record(stage, region)
        tiles = next(iter(entering.values())).shape[0]
        region = replace(region, steps=with_record(region.steps, self._records, tiles))
        if targets:
            summed = with_sums(region, self._nodes, targets)
            if summed is None:
                return self.planned(stage, values)
            region = summed
        made = {step.name for step in region.steps}.union(region.constants, self._inputs)
        rest = [node for node in self._nodes if node.name not in made and node.op != "get_attr" and not targets]
        used = {argument.name for node in rest for argument in node.all_input_nodes}
        constants = [node for node in self._nodes if node.op == "get_attr" and node.name in used]
        inputs = tuple(name for name in (*region.leaving, *region.constants, *self._inputs) if name in used)
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
        region_run = RegionRun(region, self._box, self._stored_bytes)
        return _Planned(region_run, run, inputs, frozenset(filled), tuple(paths), tuple(read), bool(targets))


class _Planned:
    """For values of one form.

    Attributes:
        run: of the region.
        rest: what follows, of the values that ``rest_inputs`` names.
        sums: what leaves the region are sums of what the model gives.
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
    ) -> None:
        self.run, self.rest, self.rest_inputs, self.sums = run, rest, rest_inputs, sums
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
        entering = [value for value in values if _is_map(value)]
        wants = torch.is_grad_enabled()
        given: tuple[Tensor, ...] = _Streamed.apply(
            self.run, stage, beside, len(entering), wants, *entering, *self.parameters(stage)
        )
        return given

    def parameters(self, stage: nn.Module) -> list[nn.Parameter]:
        """Of the region, those that are trained, each once."""
        found = [p for path in self._paths for p in stage.get_submodule(path).parameters()]
        found += [value for node in self._read if isinstance(value := attribute(stage, node), nn.Parameter)]
        return list({id(p): p for p in found if p.requires_grad}.values())


def _is_map(value: Any) -> bool:
    return isinstance(value, Tensor | Boxes) and len(value.shape) == 4


def _takes_shape(node: fx.Node) -> bool:
    """A node takes nothing but the shape of its tensor."""
    if node.op == "call_method":
        return node.target == "size"
    return bool(node.target is getattr and node.args[1] == "shape")


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
        with _precision(ctx):
            images = [t.detach() if isinstance(t, Tensor) else t for t in tensors[:count]]
            leaving, kept = run.forward(stage, images, wants, beside)
        ctx.kept = kept if wants else None
        return leaving

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        kept: Kept | None = ctx.kept
        if kept is None:
            raise RuntimeError("a tile computed box by box goes back once")
        ctx.kept = None
        run: RegionRun = ctx.run
        names = run.region.inputs
        asked = frozenset(name for k, name in enumerate(names) if ctx.needs_input_grad[5 + k])
        with _precision(ctx):
            entering, parameters = run.backward(ctx.stage, kept, gradients, ctx.parameters, asked)
        return (None, None, None, None, None, *(entering.get(name) for name in names), *parameters)


def _precision(ctx: Any) -> torch.autocast:
    """That of the forward pass. Casts are not remembered, or those made without gradients would be used with them."""
    device, dtype, enabled = ctx.precision
    return torch.autocast(device, dtype, enabled=enabled, cache_enabled=False)
