"""One thing that a benchmark measures: a strategy on a number of ranks, at a tile size.

Takes what ``app.bench`` is asked for; gives the cases, and for each the settings and arguments of ``app.train``. All
cases of a tile size compute the same tiles in microbatches of the same size, so that their losses must agree.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, cast, get_args

from app.settings.strategy import Parallel, StrategySettings
from app.settings.strategy_faults import strategy_faults
from parallel.strategy import WHOLE

SAVINGS = {"recompute": ("--recompute", "block"), "offload": ("--offload", "overlap")}
"""What can be added to a strategy with a plus: the flag and its value."""

Scaling = Literal["strong", "weak"]


@dataclass(frozen=True)
class Case:
    """One row of the table.

    Attributes:
        parallel: strategy of ``app.train``.
        savings: keys of ``SAVINGS``.
        batch, microbatches: of a step over all ranks.
        stages: of each of several groups of ranks; None: one group of all ranks, or a model that is not split.
    """

    parallel: str
    savings: tuple[str, ...]
    ranks: int
    tile: int
    batch: int
    microbatches: int
    memory: str | None = None
    stages: int | None = None

    @property
    def label(self) -> str:
        """The strategy, as the table names it: with groups and stages where there are several groups."""
        mesh = f" {self.ranks // self.stages} x {self.stages}" if self.stages else ""
        return " + ".join((self.parallel + mesh, *self.savings))

    @property
    def name(self) -> str:
        """Of its folder."""
        return f"{self.tile}px_{self.ranks}x_{self.label.replace(' ', '')}"

    @property
    def settings(self) -> StrategySettings:
        """As ``app.train`` gets them."""
        return StrategySettings(
            parallel=cast(Parallel, self.parallel),
            ranks=self.ranks,
            stages=self.stages,
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
        return "; ".join(strategy_faults(self.settings))

    @property
    def arguments(self) -> list[str]:
        """For ``app.train``: everything that tells this case from another."""
        given = [
            *("--parallel", self.parallel, "--ranks", str(self.ranks), "--tile", str(self.tile)),
            *("--batch", str(self.batch), "--microbatches", str(self.microbatches)),
            *(("--stages", str(self.stages)) if self.stages else ()),
            *(word for saving in self.savings for word in SAVINGS[saving]),
        ]
        return given if self.memory is None else [*given, "--memory", self.memory, "--developer", "memory-excess=stop"]


def parse_strategy(text: str) -> tuple[str, tuple[str, ...]]:
    """Name and savings of a strategy written as ``ddp`` or ``master+recompute+offload``.

    Raises:
        ValueError: an unknown name or saving.
    """
    name, *savings = (part.strip() for part in text.split("+"))
    names = get_args(Parallel)
    if name not in names:
        raise ValueError(f"--strategies knows {', '.join(names)}; got {name!r}")
    if unknown := [saving for saving in savings if saving not in SAVINGS]:
        raise ValueError(f"--strategies {text}: after a plus comes {' or '.join(SAVINGS)}; got {unknown[0]!r}")
    return name, tuple(saving for saving in SAVINGS if saving in savings)


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
    """Every strategy at every tile size and number of ranks: ``single`` on one rank, the others on several; those that
    split the model with each number of stages.

    Args:
        stages: those that do not divide a number of ranks are left out there; none: as many as ranks.
        batch, microbatches: of a step on the fewest ranks; the same on all with strong scaling, in proportion with
            weak.
    """
    for tile, n in itertools.product(tiles, ranks):
        growth = n / min(ranks) if scaling == "weak" else 1
        for name, savings in map(parse_strategy, strategies):
            if name == "auto" or (name == "single") == (n == 1):
                for depth in _depths(name, n, stages):
                    size = round(batch * growth), round(microbatches * growth)
                    yield Case(name, savings, n, tile, *size, memory, depth)


def _depths(name: str, ranks: int, stages: Sequence[int]) -> list[int | None]:
    if not stages or name in (*WHOLE, "auto"):
        return [None]
    return [None if depth == ranks else depth for depth in stages if not ranks % depth]
