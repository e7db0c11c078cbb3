"""What fills a rank: which part of its memory stands in the way of larger tiles.

Takes the bytes of a rank at its fullest moment and the layers it computes; gives a ``Limit`` that names the largest
part. No torch here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from parallel.cost.cluster import Cluster
from parallel.graph.layers import Layer, LayerGraph
from parallel.memory.rank_bytes import RankBytes
from parallel.plan.plan import PlanRow
from parallel.units import bytes_text


@dataclass(frozen=True)
class Limit:
    """The largest part of what a rank takes.

    Attributes:
        what: of "parameters", "activations", "working set" and "host"; of tiles computed box by box also "box", "after
            boxes", "maps on the host", "maps of norms on the host" and "tile on the host".
        layer: that the working set is of, or the px of the box; "" of other parts.
    """

    what: str
    bytes: int
    layer: str = ""

    def __str__(self) -> str:
        says = {
            "parameters": "parameters, gradients, optimizer state",
            "activations": "activations kept",
            "host": "activations on the host",
            "box": f"a box of {self.layer} px",
            "after boxes": "what follows the boxes, computed whole",
            "maps on the host": "maps between parts, on the host",
            "maps of norms on the host": "maps before norms, on the host",
            "tile on the host": "the tile, on the host",
        }.get(self.what, f"working set of {self.layer}")
        return f"{says}: {bytes_text(self.bytes)}"


def limit_of(fullest: RankBytes, graph: LayerGraph, layers: Iterable[Layer]) -> Limit:
    """Return the largest part of ``fullest``.

    Args:
        layers: of ``graph``, those that the rank computes.
    """
    parameters = fullest.parameters + fullest.gradients + fullest.optimizer
    kept = fullest.activations + fullest.boundary
    largest = max(parameters, kept, fullest.transient)
    if largest == parameters:
        return Limit("parameters", parameters)
    if largest == kept:
        return Limit("activations", kept)
    widest = max(layers, key=lambda layer: working_set(graph, layer))
    return Limit("working set", working_set(graph, widest), widest.name)


def working_set(graph: LayerGraph, layer: Layer) -> int:
    """Return the bytes that have to be there at once for ``layer`` alone, forward or backward: what it is given, gives
    and keeps, and the gradients of the former two beside the latter."""
    given = [graph.by_name[name] for name in layer.inputs]
    saved = sum(size for _, size in layer.saved)
    shared = {number for number, _ in layer.saved}
    around = [near for near in (*given, layer) if shared.isdisjoint(number for number, _ in near.output_storages)]
    forward = saved + sum(near.output_bytes for near in around)
    backward = saved + sum(near.output_bytes for near in (*given, layer) if near.differentiable)
    return max(forward, backward)


def too_small(rows: Sequence[PlanRow], cluster: Cluster) -> str:
    """Return what to say when nothing fits: the least memory that would do."""
    known = [row for row in rows if row.peak_bytes]
    if not known:
        reasons = dict.fromkeys(row.refused for row in rows)
        return f"no strategy can run: {'; '.join(reasons) or 'more ranks than --batch has tiles'}"
    nearest = min(known, key=lambda row: row.over_bytes)
    return (
        f"nothing fits in {bytes_text(cluster.memory_bytes)} a rank: {nearest.strategy} needs least, "
        f"{bytes_text(cluster.needed_bytes(max(nearest.peak_bytes)))}. Use more ranks, a smaller --tile, or "
        "--precision bf16"
    )
