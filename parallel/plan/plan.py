"""A plan: the strategy chosen, and what it is expected to do, as data that is saved and read back.

Made by ``Planner``; written as ``plan.json``. A run that is resumed, and every rank of a run, reads the same plan. No
torch here.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from parallel.memory.policy import ActivationPolicy
from parallel.space.team import Grid
from parallel.strategy import Strategy

VERSION = 3
SIMPLER = 0.01
"""A candidate has to be faster by this fraction to be preferred to one that stands before it."""
BOXES = 0.1
"""Likewise of one whose tiles are computed box by box, beside one whose are not."""


@dataclass(frozen=True)
class PlanRow:
    """What is known of one strategy before it runs.

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
            "shares": [list(share) for share in strategy.shares],
            "recompute": strategy.policy.recompute,
            "offload": strategy.policy.moves,
            "shard_optimizer": strategy.shard_optimizer,
            "stream_px": strategy.policy.stream,
            "host_bytes": self.host_bytes,
            "host_limit_bytes": strategy.policy.host_bytes,
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
        )
        ranks, depth, m, chunks = (row[name] for name in ("ranks", "depth", "m", "chunks"))
        grid = Grid.parse(row["grid"]) if row["grid"] else None
        cuts, shared = tuple(row["cuts"]), row["shard_optimizer"]
        shares = tuple(map(tuple, row.get("shares", ())))
        return cls(
            Strategy(row["strategy"], ranks, depth, m, chunks, cuts, policy, shared, grid=grid, shares=shares),
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
    """

    problem: dict[str, Any]
    row: PlanRow
    cost_source: str
    expected_error: float | None

    def dumps(self) -> str:
        """Return the plan as JSON."""
        return json.dumps(
            {
                "version": VERSION,
                "problem": self.problem,
                **self.row.to_json(),
                "cost_source": self.cost_source,
                "expected_error": self.expected_error,
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
            return cls(plan["problem"], PlanRow.from_json(plan), plan["cost_source"], plan["expected_error"])
        except (json.JSONDecodeError, KeyError, TypeError) as fault:
            raise ValueError(f"it is not a plan: {fault!r}") from fault


def best_of(rows: Iterable[PlanRow]) -> PlanRow | None:
    """Return the fastest of those that fit; one that stands before it where that is hardly slower. Where nobody knows,
    the one that does least to need less memory."""
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
    """What a strategy does to need less memory, boxes last, to compare."""
    return strategy.policy.stream is not None, len(strategy.savings.split("+"))
