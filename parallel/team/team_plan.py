"""Plan what of a traced model a team computes side by side, for tiles of one shape.

A value is sharded over the members, replicated, or on member 0 alone. No parameter is read, nothing is sent.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from parallel.offload.host_memory import HostMemory
from parallel.space.spatial_plan import SpatialPlan
from parallel.space.team import SpatialMesh, TeamGrid
from parallel.streaming.read_region import NothingTileable, read_region
from parallel.streaming.region import Region
from parallel.trace.trace import Traced
from parallel.trace.without_data import empty_like, preserve_module_state, replacements, state_of, swapped

MOST_PLANS = 64
"""Plans that are kept, each with its programs: tiles of whole slides have a shape each."""
Placement = Literal["shard", "replicate", "rank0"]


@dataclass(frozen=True, eq=False)
class TeamPlan(SpatialPlan):
    """Plan of a model in one mode, for tiles of one shape, with the nodes that compute its steps.

    Attributes:
        region: computed side by side; None where nothing can be.
        without_gradient: names of the nodes through whose values no gradient flows back.
        compiled: programs of this plan, by what runs them; they go with the plan.
    """

    region: Region | None
    without_gradient: frozenset[str] = frozenset()
    compiled: dict[Any, Any] = field(default_factory=dict)

    def placement(self, name: str) -> Placement:
        """Return where a value is."""
        if self.region is None or name in self.region.dims:
            return "rank0" if self.region is None else "shard"
        return "replicate" if name in self.by_name or name in self.region.constants else "rank0"

    def dims(self, name: str) -> tuple[int, int]:
        """Return the dims of the rows and columns of a map."""
        assert self.region is not None
        return self.region.dims[name]


Plans = Callable[[tuple[int, ...], bool], TeamPlan]
"""(shape (n, 3, h, w) of the tiles, in training) -> plan."""


@dataclass(frozen=True)
class BoxedParts:
    """Sizes of boxes and memory for their maps.

    Attributes:
        box: box size, px.
        stored_bytes: that maps between parts should take, where the sums in the model do not ask for more; None: 32
            per pixel of the tile.
        host: where maps are; None: in memory.
        map_bytes: that maps between parts may take of a GPU.
    """

    box: int
    stored_bytes: int | None = None
    host: HostMemory | None = None
    map_bytes: int = 0


def plan_alone(shape: tuple[int, ...], training: bool) -> TeamPlan:
    """Return the plan of a team of one, for tiles of ``shape`` (n, 3, h, w): nothing is divided."""
    return TeamPlan(SpatialMesh(TeamGrid(), (shape[2], shape[3])), (), {}, None, None)


def team_plans(traced: Traced, grid: TeamGrid, once: bool = True) -> Plans:
    """Return the plans of a model, each made when it is first asked for.

    Args:
        once: each member computes its part in one piece; False: in boxes, and again in the backward pass.
    """
    model, random = traced.model, {layer.name for layer in traced.graph.layers if layer.random}
    without_gradient = frozenset(layer.name for layer in traced.graph.layers if not layer.differentiable)

    @functools.lru_cache(MOST_PLANS)
    def plan(shape: tuple[int, ...], training: bool) -> TeamPlan:
        mesh = SpatialMesh(grid, (shape[2], shape[3]))
        if fault := mesh.fault(mesh.side):
            return TeamPlan(mesh, (), {}, ("the tile", fault), None, without_gradient)
        nodes = list((traced.training if training else traced.evaluation).graph.nodes)
        (entering,) = (node.name for node in nodes if node.op == "placeholder")
        with preserve_module_state(model), swapped(model, _on_one_device(model)):
            model.train(training)
            parameter = next(model.parameters())
            images = torch.zeros((), dtype=parameter.dtype.to_real(), device=parameter.device).expand(shape)
            try:
                region = read_region(model, nodes, {entering: images}, refuse=mesh.fault, once=once, random=random)
            except NothingTileable as reason:
                return TeamPlan(mesh, (), {}, reason.ends_at, None, without_gradient)
        return TeamPlan(mesh, region.steps, region.sides, region.ends_at, region, without_gradient)

    return plan


def _on_one_device(model: nn.Module) -> dict[int, Tensor]:
    """Return tensors on the CPU, without data, in place of all, by id; none unless a rank has moved its own stages."""
    if len({tensor.device for tensor in state_of(model).values()}) < 2:
        return {}
    return replacements(model, functools.partial(empty_like, device=torch.device("cpu")))
