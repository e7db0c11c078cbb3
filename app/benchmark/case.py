"""One thing that a benchmark measures: a strategy on a number of ranks, at a tile size.

Takes what ``app.bench`` is asked for; returns the cases, and for each the settings and arguments of ``app.train``. All
cases of a tile size compute the same tiles in microbatches of the same size, so that their losses must agree.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, cast

from app.benchmark.asked import SAVINGS, StrategySpec
from app.settings.strategy import Parallel, StrategySettings
from app.settings.strategy_errors import strategy_errors

Scaling = Literal["strong", "weak"]


@dataclass(frozen=True)
class Case:
    """One row of the table.

    Attributes:
        parallel: strategy of ``app.train``.
        savings: keys of ``SAVINGS``.
        batch, microbatches: of a step over all ranks.
        stages: of each of several groups of ranks; None: one group of all ranks, or a model that is not split.
        grid: of the teams, as ``--grid`` has it; empty: as the strategy has it without.
    """

    parallel: str
    savings: tuple[str, ...]
    ranks: int
    tile: int
    batch: int
    microbatches: int
    memory: str | None = None
    stages: int | None = None
    grid: str = ""

    @property
    def label(self) -> str:
        """The strategy, as the table names it: with groups and stages where several groups were asked for, and with the
        grid that was."""
        mesh = f" {self.settings.groups} x {self.stages}" if self.stages else ""
        teams = f" of {self.grid}" if self.grid else ""
        return " + ".join((self.parallel + mesh + teams, *self.savings))

    @property
    def team(self) -> str:
        """Grid of its teams, whoever chose it; empty: it has none."""
        return str(self.settings.team or "")

    @property
    def name(self) -> str:
        """Return the name of its folder."""
        return f"{self.tile}px_{self.ranks}x_{self.label.replace(' ', '')}"

    @property
    def settings(self) -> StrategySettings:
        """Return the settings that ``app.train`` gets."""
        return StrategySettings(
            parallel=cast(Parallel, self.parallel),
            ranks=self.ranks,
            stages=self.stages,
            grid=self.grid,
            batch=self.batch,
            microbatches=self.microbatches,
            recompute="block" if "recompute" in self.savings else "none",
            offload="overlap" if "offload" in self.savings else "none",
            memory=self.memory,
            memory_excess="warn" if self.memory is None else "stop",
        )

    @property
    def refusal(self) -> str:
        """Why it cannot run, as far as the settings alone tell; empty when nothing is in the way."""
        return "; ".join(strategy_errors(self.settings))

    @property
    def arguments(self) -> list[str]:
        """Return the flags of ``app.train`` that distinguish this case from others."""
        given = [
            *("--parallel", self.parallel, "--ranks", str(self.ranks), "--tile", str(self.tile)),
            *("--batch", str(self.batch), "--microbatches", str(self.microbatches)),
            *(("--stages", str(self.stages)) if self.stages else ()),
            *(("--grid", self.grid) if self.grid else ()),
            *(word for saving in self.savings for word in SAVINGS[saving]),
        ]
        return given if self.memory is None else [*given, "--memory", self.memory, "--memory-excess=stop"]


def cases_of(
    strategies: Sequence[str],
    tiles: Sequence[int],
    ranks: Sequence[int],
    stages: Sequence[int] = (),
    *,
    batch: int,
    microbatches: int,
    scaling: Scaling,
    memory: str | None,
) -> Iterator[Case]:
    """Every strategy at every tile size and number of ranks: ``single`` on one rank, the others on several, teams where
    they divide them; those that split the model with each number of stages.

    Args:
        stages: those that do not divide a number of ranks, or of teams, are left out there; none: as many.
        batch, microbatches: of a step on the fewest ranks; the same on all with strong scaling, in proportion with
            weak.
    """
    for tile, n in itertools.product(tiles, ranks):
        growth = n / min(ranks) if scaling == "weak" else 1
        size = round(batch * growth), round(microbatches * growth)
        for asked in map(StrategySpec.parse, strategies):
            for depth in asked.depths(n, stages) if asked.runs_on(n) else ():
                yield Case(asked.name, asked.savings, n, tile, *size, memory, depth, str(asked.grid or ""))
