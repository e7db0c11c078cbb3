"""The region of a traced model that can be computed box by box, as it was read: steps, and how each is computed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from parallel.space.rule import Step
from parallel.space.spatial_plan import RegionSpec
from parallel.streaming.operation import Operation

Forms = Mapping[str, tuple[tuple[int, ...], torch.dtype, torch.device]]
"""(shape, type, device) by name."""


@dataclass(frozen=True)
class Region:
    """Region of a traced model that can be computed box by box.

    Attributes:
        steps: in the order of the model.
        operations: by name of the step, of those that take maps.
        nodes: by name of the step; several steps may be of one.
        dims: of rows and columns of every map.
        sides: rows and columns of every map.
        forms: (shape, type, device) of every map.
        constants: values that are known without computing, by name: sizes, and what is made of them.
        fixed: names of plain steps that no gradient flows back through: computed once, random numbers among them.
        live_out: names that are used after the region.
        inputs: names of the maps that enter.
        given: names of the tensors without rows that enter, as a gate that an earlier stage made.
        flows: names of steps that gradients flow back through, to parameters or to what enters.
        ends_at: (layer, reason) that ended it; None where everything that has rows is in it.
        pooled: (shape, type, device) of every tensor without rows that is made inside.
    """

    steps: tuple[Step, ...]
    operations: Mapping[str, Operation]
    nodes: Mapping[str, fx.Node]
    dims: Mapping[str, tuple[int, int]]
    sides: Mapping[str, tuple[int, int]]
    forms: Forms
    constants: Mapping[str, Any]
    fixed: frozenset[str]
    live_out: tuple[str, ...]
    inputs: tuple[str, ...]
    given: tuple[str, ...]
    flows: frozenset[str]
    ends_at: tuple[str, str] | None = None
    pooled: Forms = field(default_factory=dict)

    def may_change(self, step: Step) -> bool:
        """Return whether ``step`` takes one map, which lies in memory of its own and has no other user."""
        source = step.maps[0]
        if len(step.maps) != 1 or source not in self.operations:
            return False
        return len(self.nodes[source].users) == 1 and not self.operations[source].shares

    def spec(self, side: tuple[int, int] | None = None) -> RegionSpec:
        """Return the specification that boxes are planned by.

        Args:
            side: rows and columns of the tile; None: of the largest map that enters.
        """
        sizes = {name: math.prod(self.forms[name][0]) * self.forms[name][1].itemsize for name in self.inputs}
        whole = frozenset(name for name in self.dims if name not in self.forms)
        tiles = self.forms[self.inputs[0]][0][0]
        return RegionSpec(
            self.steps,
            self.sides,
            side or max(self.sides[name] for name in self.inputs),
            sizes,
            self.live_out,
            whole,
            frozenset(self.inputs) - self.flows,
            tiles,
            self.ends_at,
        )
