"""One thing that a benchmark measures: a strategy on a number of ranks, at a tile size.

Takes what ``app.bench`` is asked for; returns the cases, and for each the settings and arguments of ``app.train``. All
cases of a tile size compute the same tiles in microbatches of the same size, so that their losses must agree.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, cast, get_args

from app.settings.strategy import Parallel, StrategySettings
from app.settings.strategy_errors import strategy_errors
from parallel.schedule.registry import SPATIAL
from parallel.space.team import Grid
from parallel.strategy import WHOLE

SAVINGS = {"recompute": ("--recompute", "block"), "offload": ("--offload", "overlap")}
"""What can be added to a strategy with a plus: the flag and its value."""
SHOWN = 3
"""Numbers of ranks that a refusal names, of all that would do."""


class StrategySpec(NamedTuple):
    """A strategy of ``app.train`` and what goes with it.

    Attributes:
        savings: keys of ``SAVINGS``.
        grid: of its teams; None: as ``app.train`` has it without ``--grid``.
    """

    name: str
    savings: tuple[str, ...] = ()
    grid: Grid | None = None

    @classmethod
    def parse(cls, text: str) -> StrategySpec:
        """Return the strategy written as ``NAME``, ``NAME@GRID`` or ``NAME@GRID+SAVING+SAVING``.

        Raises:
            ValueError: an unknown name or saving, no grid after an @, or one that the strategy has no teams for.
        """
        head, *savings = (part.strip() for part in text.split("+"))
        name, at, written = head.partition("@")
        names = get_args(Parallel)
        if name not in names:
            raise ValueError(f"--strategies knows {', '.join(names)}; got {name!r}")
        if unknown := [saving for saving in savings if saving not in SAVINGS]:
            raise ValueError(f"--strategies {text}: after a plus comes {' or '.join(SAVINGS)}; got {unknown[0]!r}")
        grid = _grid(text, name, written) if at else None
        return cls(name, tuple(saving for saving in SAVINGS if saving in savings), grid)

    @property
    def split(self) -> bool:
        """The model is split into stages."""
        return self.name not in (*WHOLE, SPATIAL.name, "auto")

    def runs_on(self, ranks: int) -> bool:
        """Return whether ``ranks`` suffice, and none is left over."""
        if (self.name == "single") != (ranks == 1):
            return self.name == "auto"
        least, step = self._numbers
        return ranks >= least and not (ranks - least) % step

    def depths(self, ranks: int, stages: Sequence[int]) -> list[int | None]:
        """Return by how many stages the model is split on ``ranks`` that it runs on, once for each of ``stages``.

        Args:
            stages: those that do not divide the places of ``ranks``, each a team or a rank, are left out; none: as many
                as places. None stands for that, too, and for what the strategy itself says.
        """
        if not stages or not self.split:
            return [None]
        places = ranks // (self.grid.members if self.grid else 1)
        return [None if depth == places else depth for depth in stages if not places % depth]

    def fault(self, ranks: Sequence[int]) -> str:
        """Return what is wrong where its teams fit none of ``ranks``; empty otherwise."""
        if not self.grid or any(map(self.runs_on, ranks)):
            return ""
        least, step = self._numbers
        usable = ", ".join(str(least + k * step) for k in range(SHOWN))
        return (
            f"--strategies {self.name}@{self.grid}: its teams take {usable} ... ranks; got --ranks "
            f"{' '.join(map(str, ranks))}: add one of these, or give another grid"
        )

    @property
    def _numbers(self) -> tuple[int, int]:
        """The fewest ranks that its teams make a group of, and how many more it takes each time."""
        if not self.grid:
            return 1, 1
        return (2 if self.split else 1) * self.grid.members, self.grid.members


def _grid(text: str, name: str, written: str) -> Grid:
    if name in (*WHOLE, "auto"):
        raise ValueError(
            f"--strategies {text}: {name} has no teams that a grid could be of: use {SPATIAL.name}, or a strategy that "
            "splits the model"
        )
    try:
        grid = Grid.parse(written)
    except ValueError as fault:
        raise ValueError(f"--strategies {text}: {fault}") from None
    if grid.members < 2:
        raise ValueError(f"--strategies {text} divides nothing: give a grid of 2 ranks or more, as 2x1")
    return grid


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
