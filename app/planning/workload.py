"""The model and its loss as a planner sees them: traced with one tile, on tensors without data.

Takes names of the command line; returns a ``Task``. No weights are drawn and no memory is taken, whatever the size of
model and tile.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from models.blocks import Norm
from models.heads import Head
from models.losses import PixelClassLoss, TileClassLoss
from models.registry import build_model
from parallel.cost.stage_cost import Costs
from parallel.engine.sharding_units import sharding_of
from parallel.graph.layers import Layer, LayerGraph
from parallel.graph.scale import BySide
from parallel.memory.gathered import Sharding
from parallel.plan.largest_tile import LIMIT
from parallel.plan.part_costs import Divisible
from parallel.plan.stages import Task
from parallel.plan.streamed import Streamed
from parallel.space.spatial_plan import RegionSpec
from parallel.space.team import TeamGrid
from parallel.stage.split_backward import DeferredWeights
from parallel.streaming.box_sums import with_sums
from parallel.streaming.read_region import read_region
from parallel.streaming.region import Region
from parallel.streaming.step_record import StepRecord, record, with_record
from parallel.trace.trace import Traced, run_again, trace
from parallel.trace.updated_search import copies_fault
from parallel.trace.without_data import preserve_module_state, refuse_tile_size

T = TypeVar("T")
FAULTS = (ValueError, RuntimeError, NotImplementedError)
"""What reading a region may raise."""
SLOTS = {"sgd": 1, "adamw": 2}
"""Values that an optimizer keeps for each parameter, beside its running average."""


@dataclass(frozen=True)
class Recorded:
    """Costs of the steps of a region, as recorded on tiles of ``side`` px; ``hints`` as in ``Streamed``."""

    records: Mapping[str, StepRecord]
    side: int
    hints: dict[tuple[int, TeamGrid | None], int] = field(default_factory=dict)


@dataclass(frozen=True)
class Workload:
    """Model and tiles to train, by name.

    Attributes:
        tile: side in px.
        segments: a class per pixel, or one per tile; None: whichever the model gives.
        autocast: type for mixed precision; None computes in float32.
        averages: a running average of each parameter is kept.
    """

    model: str
    tile: int
    classes: int
    norm: Norm = "batch"
    segments: bool | None = None
    optimizer: Literal["sgd", "adamw"] = "adamw"
    autocast: torch.dtype | None = None
    head: Head = "average"
    averages: bool = False
    _followed: list[Traced] = field(default_factory=list, repr=False, compare=False)
    _sides: dict[object, BySide[Any]] = field(default_factory=dict, repr=False, compare=False)
    _recorded: list[Recorded] = field(default_factory=list, repr=False, compare=False)
    _fits: list[tuple[nn.Module, dict[str, str], Sharding]] = field(default_factory=list, repr=False, compare=False)
    _regions: list[Region] = field(default_factory=list, init=False, repr=False, compare=False)

    def at(self, tile: int) -> Workload:
        """Return the same on tiles of another size. The model is traced once for all of them where its path is the
        same, and run for as few as show its costs on all."""
        return dataclasses.replace(self, tile=tile)

    def build(self) -> nn.Module:
        """The model, without data where it can be made so.

        Raises:
            ValueError: there is no such model.
        """
        build = functools.partial(
            build_model, self.model, classes=self.classes, norm=self.norm, head=self.head, side=self.tile
        )
        try:
            with torch.device("meta"), _SkipInit():
                return build()
        except (NotImplementedError, RuntimeError, TypeError):  # a factory that looks at the numbers it draws
            return build()

    def _trace(self) -> Traced:
        """Trace the model; where that fails for the tile size, say so."""
        model = self.build()
        try:
            return trace(model, self._shape)
        except ValueError:
            refuse_tile_size(model, self.model, self._shape)
            raise

    @property
    def _shape(self) -> tuple[int, ...]:
        return 1, 3, self.tile, self.tile

    @functools.cached_property
    def _traced(self) -> Traced:
        if self._followed and self._followed[0].any_side:
            return self._run_again(self._followed[0])
        self._followed[:] = [traced := self._trace()]
        return traced

    def _run_again(self, traced: Traced, autocast: torch.dtype | None = None) -> Traced:
        graph = self._of_side(traced, autocast, lambda work: run_again(traced, work._shape, autocast=autocast).graph)
        return dataclasses.replace(traced, graph=graph)

    def _of_side(self, traced: Traced, key: object, make: Callable[[Workload], T]) -> T:
        """Return what ``make`` returns; of a model whose path is the same for all sizes, from its values for others."""
        if not traced.any_side:
            return make(self)
        sides = self._sides.setdefault(key, BySide())
        value: T | None = sides.at(self.tile)
        if value is None:
            sides.add(self.tile, value := make(self))
            if sides.count == 2:  # several sides are asked for: all of them lie below this one, which is run once
                with contextlib.suppress(*FAULTS):
                    sides.add(LIMIT, make(self.at(LIMIT)))
        return value

    def _with_loss(self, traced: Traced) -> LayerGraph:
        return with_loss(traced.graph, self.classes, self.tile if self._segmenting(traced.graph) else None)

    def _segmenting(self, graph: LayerGraph) -> bool:
        """A class per pixel is learned."""
        if self.segments is not None:
            return self.segments
        return graph.layers[-1].output_bytes >= self.classes * self.tile**2

    @functools.cached_property
    def in_float32(self) -> LayerGraph:
        """The graph of model and loss for one tile.

        Raises:
            ValueError: the model cannot be traced, or does not run on such a tile.
        """
        return self._with_loss(self._traced)

    def task(self, batch: int, estimate: Callable[[LayerGraph], Callable[[int], Costs]]) -> Task:
        """Return the task of a planner.

        Args:
            estimate: takes the graph in float32, returns the costs of its layers by tiles of a microbatch.

        Raises:
            ValueError: as ``in_float32``.
        """
        traced = self._traced
        plain = self.in_float32
        kept = self._with_loss(self._run_again(traced, self.autocast)) if self.autocast else plain
        refused, sharding = self._what_fits(traced)
        one_copy = copies_fault(traced.updated)
        slots = SLOTS[self.optimizer] + self.averages
        in_boxes = functools.cache(lambda: self._streamed(traced, estimate))
        in_teams = functools.cache(lambda: self._divisible(traced, plain, estimate))
        return Task(kept, estimate(plain), batch, slots, refused, one_copy, sharding, in_boxes, in_teams)

    def _what_fits(self, traced: Traced) -> tuple[dict[str, str], Sharding]:
        """Return strategy -> why the model cannot be trained with it, and how fsdp treats it; asked of a model once,
        whatever its tiles."""
        model = traced.model
        if not self._fits or self._fits[0][0] is not model:
            refused, sharding = {}, Sharding()
            try:
                DeferredWeights(model)
            except ValueError as fault:
                refused["zero-bubble"] = str(fault)
            try:
                sharding = sharding_of(model)
            except ValueError as fault:
                refused["fsdp"] = str(fault)
            self._fits[:] = [(model, refused, sharding)]
        return self._fits[0][1:]

    def _divisible(
        self, traced: Traced, plain: LayerGraph, estimate: Callable[[LayerGraph], Callable[[int], Costs]]
    ) -> tuple[Divisible | None, str]:
        """The model as teams see it; or None, and why no tile can be divided."""
        try:
            region = self._of_side(traced, "teams", lambda work: work._region_of_teams(traced).spec())
            return Divisible(region, plain, estimate), ""
        except FAULTS as fault:
            return None, str(fault)

    def _region_of_teams(self, traced: Traced) -> Region:
        """Return the part of the model that has rows where each node is computed once."""
        with contextlib.suppress(*FAULTS):
            region = self._region(traced)
            if region.ends_at is None:
                return region
        return self._read(traced, once=True)

    def _region(self, traced: Traced) -> Region:
        """Return the part of the model that has rows, in training, where nodes are recomputed."""
        if not self._regions:
            self._regions.append(self._read(traced))
        return self._regions[0]

    def _read(self, traced: Traced, once: bool = False) -> Region:
        model, nodes = traced.model, list(traced.training.graph.nodes)
        device = next((parameter.device for parameter in model.parameters()), torch.device("meta"))
        image = torch.empty((), device=device).expand(self._shape)
        entering = {node.name: image for node in nodes if node.op == "placeholder"}
        random = {layer.name for layer in traced.graph.layers if layer.random}
        with preserve_module_state(model):
            model.train()
            return read_region(model, nodes, entering, once=once, updated=traced.updated, random=random)

    def _streamed(
        self, traced: Traced, estimate: Callable[[LayerGraph], Callable[[int], Costs]]
    ) -> tuple[Streamed | None, str]:
        """The model as streaming sees it; or None, and why it cannot be computed box by box."""
        try:
            paper, whole = self._of_side(traced, "boxes", Workload._in_boxes)
        except FAULTS as fault:
            return None, str(fault)
        (known,) = self._recorded
        ops = {name: each.ops for name, each in known.records.items()}
        if whole:
            layers = _loss_layers(self.classes, known.side)
            ops[paper.steps[-1].name] = tuple(op for layer in layers for op in layer.ops)
        return Streamed(paper, ops, known.side, estimate, whole, known.hints), ""

    def _in_boxes(self) -> tuple[RegionSpec, bool]:
        """The region that goes box by box, as recorded, and whether the loss is in it."""
        traced = self._traced
        model, nodes = traced.model, list(traced.training.graph.nodes)
        with preserve_module_state(model):
            model.train()
            region = self._region(traced)
            known = self._recorded[0] if self._recorded else None
            if known is None or not all(step.global_op or step.name in known.records for step in region.steps):
                known = Recorded(record(model, region), self.tile)
                self._recorded[:] = [known]
        region = dataclasses.replace(region, steps=with_record(region.steps, known.records, 1))
        summed = with_sums(region, nodes, (1, self.tile, self.tile)) if self._segmenting(traced.graph) else None
        return (summed or region).spec(), summed is not None


def with_loss(graph: LayerGraph, classes: int, side: int | None) -> LayerGraph:
    """``graph`` of one tile, its output layer computing the loss too, as the last stage does.

    Args:
        side: px of the pixels that are classified; None: one class per tile.
    """
    computed = _loss_layers(classes, side)
    free = 1 + max((number for layer in graph.layers for number, _ in layer.saved), default=0)
    output = dataclasses.replace(
        graph.layers[-1],
        saved=tuple({free + number: size for layer in computed for number, size in layer.saved}.items()),
        ops=tuple(op for layer in computed for op in layer.ops),
    )
    return dataclasses.replace(graph, layers=(*graph.layers[:-1], output))


@functools.lru_cache(maxsize=64)
def _loss_layers(classes: int, side: int | None) -> tuple[Layer, ...]:
    shape = (1, classes) if side is None else (1, classes, side, side)
    loss = trace(_LossOnLogits(TileClassLoss() if side is None else PixelClassLoss()), shape).graph
    return loss.layers[3:]  # behind the input, the zero, and their sum


class _SkipInit(TorchFunctionMode):
    """Leaves out random numbers for tensors without data: a normal distribution takes long to draw none of."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in (Tensor.normal_, Tensor.uniform_) and args[0].is_meta:
            return args[0]
        return func(*args, **(kwargs or {}))


class _LossOnLogits(nn.Module):
    """A loss of logits (n, C) or (n, C, h, w) that need a gradient."""

    def __init__(self, loss: nn.Module) -> None:
        super().__init__()
        self.zero = nn.Parameter(torch.zeros(()))
        self.loss = _ZeroTargets(loss)

    def forward(self, logits: Tensor) -> Tensor:
        value: Tensor = self.loss(logits + self.zero)
        return value


class _ZeroTargets(nn.Module):
    def __init__(self, loss: nn.Module) -> None:
        super().__init__()
        self.loss = loss

    def forward(self, logits: Tensor) -> Tensor:
        places = (logits.shape[0], *logits.shape[2:])
        dtype = torch.uint8 if len(places) > 1 else torch.int64  # as the stream gives masks and labels
        value: Tensor = self.loss(logits, torch.zeros(places, dtype=dtype, device=logits.device))
        return value
