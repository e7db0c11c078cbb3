"""A strategy as ``app.bench`` is asked for it: its name, the grid of its teams, and what it saves.

Takes what a user writes, such as ``ddp``, ``master+recompute`` or ``1f1b@2x1``; says on which numbers of ranks it runs,
and over how many stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, get_args

from app.settings.strategy import Parallel
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
