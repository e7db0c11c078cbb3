"""Sums over boxes of the map that a model gives and of a map of targets, as those of a loss of pixels: a last step of
the region, so that neither the map nor its gradient is ever stored whole.

Takes a region; gives it with that step, or None where the map that leaves it is not what the model gives.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, fx

from parallel.space.cuts import Span
from parallel.space.rule import Step
from parallel.space.team import Box
from parallel.streaming.operation import DIMS, Operation
from parallel.streaming.region import Region
from parallel.trace.stage_module import Boxes

STEP, ASKED = "~sums", "~asked"
KEEPS = 6.0
"""Bytes that the backward pass of a loss of pixels needs for each byte of the map: logarithms, probabilities, classes
as integers of 8 bytes and products, for 4-byte numbers."""


@runtime_checkable
class SummedLoss(Protocol):
    """A loss made of sums over the pixels of a tile, which boxes of the tile add up to."""

    def __call__(self, output: Any, targets: Tensor) -> Tensor: ...

    def sums(self, output: Any, targets: Tensor) -> Tensor:
        """Return what a box adds: (n, K), of the box's part of ``output`` and of ``targets`` (n, h, w)."""
        ...

    def value(self, sums: Tensor, pixels: int) -> Tensor:
        """Return the loss of tiles of ``pixels`` px from the sums of all their boxes."""
        ...


Sums = Callable[[Any, Tensor], Tensor]
"""(output of the model or a box of it, targets of the same rows) -> (n, K), which boxes add up to."""


@dataclass(frozen=True)
class BoxSums:
    """Sums over the boxes of a map (n, c, h, w).

    Attributes:
        targets: (n, h, w), on whatever device, or made box by box.
    """

    sums: Sums
    targets: Tensor | Boxes

    @property
    def pixels(self) -> int:
        """Return the pixels of a tile."""
        rows, columns = self.targets.shape[1:]
        return int(rows * columns)

    def of_part(self, output: Tensor, box: Box) -> Tensor:
        """Return what the rows and columns ``box`` of the output add."""
        return self.sums(output, self._targets(*box).to(output.device))

    def of_whole(self, output: Any) -> Tensor:
        """Return the sums of an output that a model gave whole."""
        rows, columns = (Span(0, side) for side in self.targets.shape[1:])
        targets = self._targets(rows, columns)
        return self.sums(output, targets.to(output.device) if isinstance(output, Tensor) else targets)

    def _targets(self, rows: Span, columns: Span) -> Tensor:
        if isinstance(self.targets, Tensor):
            return self.targets[:, rows.start : rows.stop, columns.start : columns.stop]
        return self.targets.box(rows, columns)


def with_sums(region: Region, nodes: Sequence[fx.Node], shape: Sequence[int]) -> Region | None:
    """Return ``region`` with a last step, whose value leaves it alone: sums of what the model gives and of targets.

    Args:
        nodes: of the model.
        shape: of the targets.

    Returns:
        None where the model gives other than one map (n, c, h, w) with h and w of ``shape`` (n, h, w) that leaves the
        region as it is.
    """
    (output,) = (node for node in nodes if node.op == "output")
    source = output.args[0]
    if not isinstance(source, fx.Node) or region.live_out != (source.name,) or region.dims.get(source.name) != DIMS:
        return None
    made, kind, _ = region.forms[source.name]
    if len(made) != 4 or (made[0], *made[2:]) != tuple(shape):
        return None
    name, size = output.name + STEP, float(math.prod(made))
    step = Step(
        name,
        (source.name,),
        sides=region.sides[source.name],
        sums=True,
        flops=100.0 * size,
        kept_bytes=int(KEEPS * size * kind.itemsize),
        value_bytes=8 * made[0],
    )
    operation = Operation(lambda given: given.prior(ASKED).of_part(given.patch.tensor, given.patch.box), sums=True)
    return replace(
        region,
        steps=(*region.steps, step),
        operations={**region.operations, name: operation},
        nodes={**region.nodes, name: output},
        live_out=(name,),
        flows=region.flows | ({name} if source.name in region.flows else set()),
    )
