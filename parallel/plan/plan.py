"""A plan: the strategy chosen, and what it is expected to do, as data that is saved and read back.

Made by ``Planner``; written as ``plan.json``. A run that is resumed, and every rank of a run, reads the same plan. No
torch here.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from parallel.plan.candidate import Candidate

VERSION = 2
SIMPLER = 0.01
"""A candidate has to be faster by this fraction to be preferred to one that stands before it."""


@dataclass(frozen=True)
class PlanRow:
    """What is known of one candidate before it runs.

    Attributes:
        cuts: names of the layers that begin a stage.
        images_per_second: predicted; None where times are not known or it cannot run.
        bubble: part of the ranks' time in which they wait for each other.
        peak_bytes: per rank of one group, from its first.
        over_bytes: by how much the fullest rank misses the memory, or the host's; 0 where it fits.
        refused: why it cannot run whatever the memory.
        chosen: names of the first and last layer of each run of layers that is computed again, where recomputation is
            "optimal".
        ahead_bytes: that offloading leaves on the device, or brings back ahead of their use.
    """

    candidate: Candidate
    cuts: tuple[str, ...] = ()
    images_per_second: float | None = None
    step_s: float | None = None
    bubble: float | None = None
    peak_bytes: tuple[int, ...] = ()
    over_bytes: int = 0
    refused: str = ""
    chosen: tuple[tuple[str, str], ...] = ()
    ahead_bytes: int = 0

    @property
    def fits(self) -> bool:
        return not self.refused and self.over_bytes == 0

    def to_json(self) -> dict[str, Any]:
        """As a row of ``candidates.json``."""
        candidate = dataclasses.asdict(self.candidate)
        return {
            "strategy": candidate.pop("name"),
            "fits": self.fits,
            "images_per_second": self.images_per_second,
            "peak_memory_bytes": list(self.peak_bytes),
            "over_bytes": self.over_bytes,
            "step_s": self.step_s,
            "bubble": self.bubble,
            "cuts": list(self.cuts),
            "refused": self.refused,
            "recomputed": [list(run) for run in self.chosen],
            "ahead_bytes": self.ahead_bytes,
            **candidate,
        }

    @classmethod
    def from_json(cls, row: dict[str, Any]) -> PlanRow:
        names = [field.name for field in dataclasses.fields(Candidate)]
        candidate = Candidate(**{name: row["strategy" if name == "name" else name] for name in names})
        return cls(
            candidate,
            tuple(row["cuts"]),
            row["images_per_second"],
            row["step_s"],
            row["bubble"],
            tuple(row["peak_memory_bytes"]),
            row["over_bytes"],
            row["refused"],
            tuple((first, last) for first, last in row["recomputed"]),
            row["ahead_bytes"],
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
        """As JSON."""
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
        """What ``dumps`` gave.

        Raises:
            ValueError: the text is no plan of this version.
        """
        try:
            found = json.loads(text)
            if found["version"] != VERSION:
                raise ValueError(f"it is of version {found['version']}, and this program reads version {VERSION}")
            return cls(found["problem"], PlanRow.from_json(found), found["cost_source"], found["expected_error"])
        except (json.JSONDecodeError, KeyError, TypeError) as fault:
            raise ValueError(f"it is not a plan: {fault!r}") from fault


def best_of(rows: Iterable[PlanRow]) -> PlanRow | None:
    """The fastest of those that fit; one that stands before it where that is hardly slower. Where nobody knows, the one
    that does least to need less memory."""
    best: PlanRow | None = None
    for row in rows:
        if row.fits and (best is None or _better(row, best)):
            best = row
    return best


def _better(row: PlanRow, best: PlanRow) -> bool:
    if row.images_per_second is None and best.images_per_second is None:
        return len(row.candidate.savings.split("+")) < len(best.candidate.savings.split("+"))
    return (row.images_per_second or 0) > (1 + SIMPLER) * (best.images_per_second or 0)
