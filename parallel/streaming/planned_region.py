"""A region of a model planned for values of one form, as one operation of autograd, and what follows it.

Takes a region in boxes and the values of a stage; gives what leaves the region. Each parameter has one gradient.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from parallel.streaming.operation import attribute
from parallel.streaming.region_run import Kept, RegionRun
from parallel.trace.images import Boxes, whole
from parallel.trace.stage_module import Run


class PlannedRegion:
    """A region in boxes for values of one form, and what follows it.

    Attributes:
        run: of the region.
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
