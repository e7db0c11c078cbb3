"""Layers -> stages, and what passes between the stages.

A partition is a list of cuts through the graph's order, so that every value flows from earlier stages to later ones. A
value that several stages use is sent to each of them directly by the stage that made it.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from parallel.graph import LayerGraph

RANDOM_STATE = "#random"
"""Pseudo-value: the state of the random generator after a stage's forward pass, handed to the next stage that draws, so
that dropout is what the plain model draws."""


@dataclass(frozen=True, slots=True, order=True)
class Edge:
    """``value`` goes from stage ``source``, which makes it, to stage ``target``, which uses it."""

    source: int
    target: int
    value: str
    differentiable: bool


@dataclass(frozen=True)
class Partition:
    """Stages of a model.

    Attributes:
        starts: position in ``graph.layers`` of the first layer of each stage; the first is 0.
    """

    graph: LayerGraph
    starts: tuple[int, ...]

    @property
    def depth(self) -> int:
        """Number of stages, D."""
        return len(self.starts)

    @functools.cached_property
    def edges(self) -> tuple[Edge, ...]:
        """Between stages, by source, target and value."""
        raise NotImplementedError
