"""The training task of a planner: model, batch and costs. No torch here."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from parallel.cost.stage_cost import Costs
from parallel.graph.layers import LayerGraph
from parallel.plan.side_by_side import Divisible
from parallel.plan.streamed import Streamed


@dataclass(frozen=True)
class Task:
    """What is to be trained.

    Attributes:
        graph: of the model and its loss, traced with a microbatch of one tile.
        estimate: gives what the layers cost with a microbatch of so many tiles.
        batch: tiles of a step over all ranks.
        slots: values that the optimizer keeps for each parameter: 1 for momentum, 2 for Adam.
        refused: strategy -> why the model cannot be trained with it.
        one_copy: why no two ranks may hold a copy of a stage; empty where they may.
        in_boxes: gives the model as streaming sees it, or None and why it cannot be computed box by box.
        in_teams: gives the model as teams see it, or None and why no tile of it can be divided.
    """

    graph: LayerGraph
    estimate: Callable[[int], Costs]
    batch: int
    slots: int
    refused: Mapping[str, str] = field(default_factory=dict)
    one_copy: str = ""
    in_boxes: Callable[[], tuple[Streamed | None, str]] = lambda: (None, "")
    in_teams: Callable[[], tuple[Divisible | None, str]] = lambda: (None, "")

    @property
    def streamed(self) -> Streamed | None:
        """The model as streaming sees it; None where it cannot be computed box by box."""
        return self._boxes[0]

    @property
    def not_streamed(self) -> str:
        """Why it cannot."""
        return self._boxes[1]

    @functools.cached_property
    def _boxes(self) -> tuple[Streamed | None, str]:
        return self.in_boxes()

    @property
    def divisible(self) -> Divisible | None:
        """The model as teams see it; None where no tile of it can be divided."""
        return self._teams[0]

    @property
    def not_divisible(self) -> str:
        """Why none can."""
        return self._teams[1]

    @functools.cached_property
    def _teams(self) -> tuple[Divisible | None, str]:
        return self.in_teams()
