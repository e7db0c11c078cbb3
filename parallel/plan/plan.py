"""A plan: the strategy chosen, and what it is expected to do, as data that is saved and read back.

Made by ``Planner``; written as ``plan.json``. A run that is resumed, and every rank of a run, reads the same plan.
``Limit`` names the part of a rank's memory that stands in the way of larger tiles. No torch here.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from parallel.cost.cluster import Cluster
from parallel.graph.layers import Layer, LayerGraph
from parallel.memory.policy import ActivationPolicy
from parallel.memory.rank_bytes import RankBytes
from parallel.space.team import TeamGrid
from parallel.strategy import Strategy
from parallel.units import bytes_text

VERSION = 3
SIMPLER = 0.01
"""A candidate has to be faster by this fraction to be preferred to one that stands before it."""
BOXES = 0.1
"""Likewise of one whose tiles are computed box by box, compared with one whose are not."""


@dataclass(frozen=True)
class PlanRow:
    """Prediction of one strategy before it runs.

    Attributes:
        images_per_second: predicted; None where times are not known or it cannot run.
        bubble: part of the ranks' time in which they wait for each other.
        peak_bytes: per rank of one group, from its first.
        over_bytes: by how much the fullest rank misses the memory, or the host's; 0 where it fits.
        refused: why it cannot run whatever the memory.
        host_bytes: that the fullest rank takes on the host for what it moves there.
    """

    strategy: Strategy
    images_per_second: float | None = None
    step_s: float | None = None
    bubble: float | None = None
    peak_bytes: tuple[int, ...] = ()
    over_bytes: int = 0
    refused: str = ""
    host_bytes: int = 0

    @property
    def fits(self) -> bool:
        return not self.refused and self.over_bytes == 0

    def to_json(self) -> dict[str, Any]:
        """Return the row as ``candidates.json`` has it."""
        strategy = self.strategy
        return {
            "strategy": strategy.name,
            "fits": self.fits,
            "images_per_second": self.images_per_second,
            "peak_memory_bytes": list(self.peak_bytes),
            "over_bytes": self.over_bytes,
            "step_s": self.step_s,
            "bubble": self.bubble,
            "cuts": list(strategy.cuts),
            "refused": self.refused,
            "recomputed": [list(run) for run in strategy.policy.chosen],
            "ahead_bytes": strategy.policy.ahead,
            "ranks": strategy.ranks,
            "depth": strategy.depth,
            "m": strategy.m,
            "chunks": strategy.chunks,
            "grid": str(strategy.grid) if strategy.grid else None,
            "ways": strategy.ways,
            "shares": [list(share) for share in strategy.shares],
            "recompute": strategy.policy.recompute,
            "offload": strategy.policy.moves,
            "zero": strategy.zero,
            "stream_px": strategy.policy.stream,
            "host_bytes": self.host_bytes,
            "host_limit_bytes": strategy.policy.host_bytes,
            "map_bytes": strategy.policy.map_bytes,
        }

    @classmethod
    def from_json(cls, row: dict[str, Any]) -> PlanRow:
        """Return the row that ``to_json`` wrote.

        Raises:
            KeyError: something of it is missing.
        """
        policy = ActivationPolicy(
            row["recompute"],
            tuple((first, last) for first, last in row["recomputed"]),
            "overlap" if row["offload"] else "none",
            row["ahead_bytes"],
            host_bytes=row.get("host_limit_bytes"),
            stream=row.get("stream_px"),
            map_bytes=row.get("map_bytes"),
        )
        ranks, depth, m, chunks = (row[name] for name in ("ranks", "depth", "m", "chunks"))
        grid = TeamGrid.parse(row["grid"]) if row["grid"] else None
        cuts, zero, ways = tuple(row["cuts"]), row.get("zero", 0), row.get("ways", 1)
        shares = tuple(map(tuple, row.get("shares", ())))
        return cls(
            Strategy(row["strategy"], ranks, depth, m, chunks, cuts, policy, zero, grid=grid, shares=shares, ways=ways),
            row["images_per_second"],
            row["step_s"],
            row["bubble"],
            tuple(row["peak_memory_bytes"]),
            row["over_bytes"],
            row["refused"],
            row.get("host_bytes", 0),
        )


@dataclass(frozen=True)
class Plan:
    """The choice for one problem.

    Attributes:
        problem: model, tile, batch, ranks, memory and whatever else the choice depends on, for people and comparison.
        row: the candidate chosen.
        cost_source: where the times come from.
        expected_error: relative, of a layer's time; None where unknown.
        stage_seconds: of each stage, forward and backward of one microbatch.
    """

    problem: dict[str, Any]
    row: PlanRow
    cost_source: str
    expected_error: float | None
    stage_seconds: tuple[float, ...] = ()

    def dumps(self) -> str:
        """Return the plan as JSON."""
        return json.dumps(
            {
                "version": VERSION,
                "problem": self.problem,
                **self.row.to_json(),
                "cost_source": self.cost_source,
                "expected_error": self.expected_error,
                "stage_seconds": list(self.stage_seconds),
            },
            indent=2,
        )

    @classmethod
    def loads(cls, text: str) -> Plan:
        """Return the plan that ``dumps`` wrote.

        Raises:
            ValueError: the text is no plan of this version.
        """
        try:
            plan = json.loads(text)
            if plan["version"] != VERSION:
                raise ValueError(f"it is of version {plan['version']}, and this program reads version {VERSION}")
            row, seconds = PlanRow.from_json(plan), tuple(plan.get("stage_seconds", ()))
            return cls(plan["problem"], row, plan["cost_source"], plan["expected_error"], seconds)
        except (json.JSONDecodeError, KeyError, TypeError) as fault:
            raise ValueError(f"it is not a plan: {fault!r}") from fault


def best_of(rows: Iterable[PlanRow]) -> PlanRow | None:
    """Return the fastest of those that fit, or one before it that is hardly slower; where times are not known, the one
    that does least to need less memory."""
    best: PlanRow | None = None
    for row in rows:
        if row.fits and (best is None or _better(row, best)):
            best = row
    return best


def _better(row: PlanRow, best: PlanRow) -> bool:
    margin = SIMPLER + BOXES * (bool(row.strategy.policy.stream) - bool(best.strategy.policy.stream))
    if row.images_per_second is None and best.images_per_second is None:
        return _done(row.strategy) < _done(best.strategy)
    return (row.images_per_second or 0) > (1 + margin) * (best.images_per_second or 0)


def _done(strategy: Strategy) -> tuple[bool, int]:
    """Return a key that orders strategies by what they do to need less memory, boxes last."""
    return strategy.policy.stream is not None, len(strategy.policy_text.split("+"))


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
    """Return the bytes that ``layer`` alone needs at the same time: forward its inputs, outputs and saved tensors,
    backward the saved tensors and the gradients of inputs and outputs."""
    given = [graph.by_name[name] for name in layer.inputs]
    saved = sum(size for _, size in layer.saved)
    shared = {number for number, _ in layer.saved}
    around = [near for near in (*given, layer) if shared.isdisjoint(number for number, _ in near.output_storages)]
    forward = saved + sum(near.output_bytes for near in around)
    backward = saved + sum(near.output_bytes for near in (*given, layer) if near.differentiable)
    return max(forward, backward)


def too_small(rows: Sequence[PlanRow], cluster: Cluster) -> str:
    """Return what to say when nothing fits: the least memory, of the device or the host, that would do."""
    known = [row for row in rows if row.peak_bytes]
    if not known:
        reasons = dict.fromkeys(row.refused for row in rows)
        none = "name another --parallel, --stages or --microbatches, or a --batch with a tile for each rank"
        return f"no strategy can run: {'; '.join(reasons) or none}"
    nearest = min(known, key=lambda row: row.over_bytes)
    peak = max(nearest.peak_bytes)
    if peak <= cluster.usable_bytes:
        host = round(cluster.host_bytes)
        return (
            f"nothing fits in {bytes_text(host)} of host memory a rank: {nearest.strategy} needs least, "
            f"{bytes_text(host + nearest.over_bytes)}. Give more (--host-memory of app.plan, --offload-host of "
            "app.train), more --memory, or a smaller --tile"
        )
    return (
        f"nothing fits in {bytes_text(cluster.memory_bytes)} a rank: {nearest.strategy} needs least, "
        f"{bytes_text(cluster.needed_bytes(peak))}. Use more ranks or a smaller --tile"
    )
