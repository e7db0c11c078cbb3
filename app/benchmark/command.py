"""Flags of ``python -m app.bench``, their errors, and the cases that they ask for: a strategy, ranks and a tile size.

All cases of a tile size compute the same tiles in microbatches of the same size, so that their losses must agree.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from app.settings.fields import arguments_for, at_least, broken, error_of, sizes
from app.settings.launcher import find_launch
from app.settings.optimization import ModelSettings
from app.settings.run import DataSettings
from app.settings.strategy import Parallel, StrategySettings
from app.settings.strategy_errors import strategy_errors
from parallel.schedule.registry import SPATIAL
from parallel.space.team import TeamGrid
from parallel.strategy import WHOLE
from pipelines import Rare

SAVINGS: dict[str, Any] = {"recompute": "block", "offload": "overlap", "stream": "auto"}
"""What can be added to a strategy with a plus: the setting and its value."""
SHOWN = 3
"""Numbers of ranks that a refusal names, of all that would do."""
STRATEGIES = (
    *("single", "single+recompute", "ddp", "ddp+recompute", "fsdp", "spatial"),
    *("gpipe", "1f1b", "master", "master+recompute", "bidirectional"),
)
WARM_UP = 2
"""Steps of a run that its figures leave out (``app.training.outcome``)."""


class StrategySpec(NamedTuple):
    """A strategy of ``app.train`` and what goes with it.

    Attributes:
        savings: keys of ``SAVINGS``.
        grid: of its teams; None: as ``app.train`` has it without ``--grid``.
    """

    name: str
    savings: tuple[str, ...] = ()
    grid: TeamGrid | None = None

    @classmethod
    def parse(cls, text: str) -> StrategySpec:
        """Return the strategy written as ``NAME``, ``NAME@GRID`` or ``NAME@GRID+SAVING+SAVING``.

        Raises:
            ValueError: an unknown name or saving, no grid after an @, or one that the strategy has no teams for.
        """
        head, *savings = (part.strip() for part in text.split("+"))
        name, at, written = head.partition("@")
        names, grid = get_args(Parallel), None
        if name not in names:
            raise ValueError(f"--strategies knows {', '.join(names)}; got {name!r}")
        if unknown := [saving for saving in savings if saving not in SAVINGS]:
            raise ValueError(f"--strategies {text}: after a plus comes one of {', '.join(SAVINGS)}; got {unknown[0]!r}")
        if at and name in (*WHOLE, "auto"):
            raise ValueError(
                f"--strategies {text}: {name} has no teams that a grid could be of: use {SPATIAL.name}, or a strategy "
                "that splits the model"
            )
        if at:
            try:
                grid = TeamGrid.parse(written)
            except ValueError as fault:
                raise ValueError(f"--strategies {text}: {fault}") from None
        if grid and grid.members < 2:
            raise ValueError(f"--strategies {text} divides nothing: give a grid of 2 ranks or more, as 2x1")
        return cls(name, tuple(saving for saving in SAVINGS if saving in savings), grid)

    @property
    def split(self) -> bool:
        """The model is split into stages."""
        return self.name not in (*WHOLE, SPATIAL.name, "auto")

    def runs_on(self, ranks: int) -> bool:
        """Return whether ``ranks`` suffice, and none is left over."""
        if (self.name == "single") != (ranks == 1):
            return self.name == "auto"
        least = 2 * self._members if self.split else self._members
        return ranks >= least and not ranks % self._members

    def depths(self, ranks: int, stages: Sequence[int]) -> list[int | None]:
        """Return the stages that the model is split into on ``ranks``, for each of ``stages`` that divides the teams or
        ranks; None: all of these, or a model that is not split."""
        if not stages or not self.split:
            return [None]
        places = ranks // self._members
        return [None if depth == places else depth for depth in stages if not places % depth]

    def errors(self, ranks: Sequence[int]) -> list[str]:
        """Return the error where its teams fit none of ``ranks``."""
        if not self.grid or any(map(self.runs_on, ranks)):
            return []
        usable = ", ".join(map(str, itertools.islice(filter(self.runs_on, itertools.count()), SHOWN)))
        return [
            f"--strategies {self.name}@{self.grid}: its teams take {usable} ... ranks; got --ranks "
            f"{' '.join(map(str, ranks))}: add one of these, or give another grid"
        ]

    @property
    def _members(self) -> int:
        """Ranks of a team; 1 without a grid."""
        return self.grid.members if self.grid else 1


@dataclass(frozen=True)
class Case:
    """One row of the table.

    Attributes:
        batch, microbatches: of a step over all ranks.
        stages: of each of several groups of ranks; None: one group of all ranks, or a model that is not split.
    """

    strategy: StrategySpec
    ranks: int
    tile: int
    batch: int
    microbatches: int
    memory: str | None = None
    stages: int | None = None

    @property
    def label(self) -> str:
        """The strategy as the table names it, with the groups, stages and grid that were requested."""
        name, savings, grid = self.strategy
        mesh = f" {self.settings.groups} x {self.stages}" if self.stages else ""
        teams = f" of {grid}" if grid else ""
        return " + ".join((name + mesh + teams, *savings))

    @property
    def name(self) -> str:
        """Return the name of its folder."""
        return f"{self.tile}px_{self.ranks}x_{self.label.replace(' ', '')}"

    @property
    def _given(self) -> dict[str, Any]:
        parallel, savings, grid = self.strategy
        given: dict[str, Any] = {"parallel": parallel, "grid": str(grid)} if grid else {"parallel": parallel}
        names = ("ranks", "batch", "microbatches", "stages", "memory")
        given |= {name: value for name in names if (value := getattr(self, name))}
        given |= {saving: SAVINGS[saving] for saving in savings}
        return given if self.memory is None else {**given, "memory_excess": "stop"}

    @property
    def settings(self) -> StrategySettings:
        """Return the settings that ``app.train`` gets."""
        return StrategySettings(**self._given)

    @property
    def refusal(self) -> str:
        """Errors of its settings; empty when there are none."""
        return "; ".join(strategy_errors(self.settings))

    @property
    def arguments(self) -> list[str]:
        """Return the flags of ``app.train`` that distinguish this case from others."""
        return arguments_for({"tile": self.tile, **self._given})


@dataclass(frozen=True)
class BenchCommand:
    """Measure strategies and data-parallel baselines on the same tiles: a table, bench.json and report.html."""

    data: DataSettings
    net: ModelSettings = field(default_factory=ModelSettings)
    tiles: tuple[int, ...] = (512, 1024)
    """Tile sides in px, one after the other."""
    mpp: float = 0.5
    """Resolution of the tiles, um/px."""
    min_tissue: float = 0.25
    """Least part of a tile that is tissue, 0 to 1."""
    ranks: tuple[int, ...] = (1, 2)
    """Numbers of processes on this machine, which share its cores or have a GPU each."""
    stages: tuple[int, ...] = ()
    """Numbers of ranks, or teams, that a copy of the model is split over; more make groups. Default: all ranks."""
    strategies: tuple[str, ...] = STRATEGIES
    """Strategies of app.train, as NAME, NAME@GRID (1f1b@2x1), NAME+recompute, NAME+offload or NAME+stream; ddp is the
    baseline."""
    batch: int = 8
    """Tiles of one optimiser step, over all ranks."""
    microbatches: int | None = None
    """Parts the global batch is computed in, over all ranks. Default: two for each of the most ranks."""
    scaling: Literal["strong", "weak"] = "strong"
    """With several --ranks. strong: the same batch on all of them; weak: --batch is that of the fewest, and it grows
    with the ranks."""
    memory: str | None = None
    """Memory of each rank's device, such as 2GiB; more is out of memory, on a CPU, too. Default: what there is."""
    steps: int = 5
    """Optimiser steps of a run; the first two are a warm-up and are not counted."""
    twin_steps: Rare[int] = 3
    """Steps that are then measured from memory, to tell reading from computing; 0: none."""
    repeats: int = 3
    """Runs of each case; all cases are run once before any is run again."""
    optimizer: Literal["sgd", "adamw"] = "adamw"
    """Update rule."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute; auto takes a GPU when there is one."""
    precision: Literal["auto", "fp32", "tf32", "bf16"] = "auto"
    """As for app.train. auto: bf16 on GPUs that compute in it, fp32 elsewhere."""
    trial_timeout_s: Rare[float] = 3600.0
    """Seconds after which a run is ended and counts as failed."""
    seed: int = 0
    """Of weights, order and augmentation."""
    resume: bool = False
    """Go on with the benchmark in --out: runs that are done or out of memory are kept, others repeated. More tiles,
    ranks, strategies and repeats may be asked for."""
    out: Path = Path("runs/bench")
    """Folder for bench.json, report.html, and the runs."""

    @property
    def m(self) -> int:
        """Microbatches of a step on the fewest ranks."""
        return self.microbatches or max(1, min(self.batch, 2 * max(self.ranks)))

    def cases(self) -> list[Case]:
        """Return every strategy at every tile size and number of ranks, in order: ``single`` on one rank, the others on
        several, teams where they divide them; those that split the model with each of ``stages`` that divides them."""
        cases = []
        for tile, n in itertools.product(self.tiles, self.ranks):
            growth = n / min(self.ranks) if self.scaling == "weak" else 1
            size = round(self.batch * growth), round(self.m * growth)
            for strategy in map(StrategySpec.parse, self.strategies):
                for depth in strategy.depths(n, self.stages) if strategy.runs_on(n) else ():
                    cases.append(Case(strategy, n, tile, *size, self.memory, depth))
        return cases

    def validate(self) -> list[str]:
        ranks, m = " ".join(map(str, self.ranks)), self.microbatches
        lists = {name: getattr(self, name) for name in ("tiles", "ranks", "strategies", "stages")}
        rules: dict[str, object] = {
            f"--{name} takes one or more, each once; got {' '.join(map(str, values)) or 'none'}": (
                (not values and name != "stages") or len(set(values)) < len(values)
            )
            for name, values in lists.items()
        }
        rules |= at_least(self, batch=1, steps=WARM_UP + 1, repeats=1, twin_steps=0)
        rules |= {f"--{k} must be at least 1; got {n}": n < 1 for k in ("tiles", "ranks") for n in lists[k]}
        rules |= {
            f"--stages takes numbers of 2 or more that divide one of --ranks {ranks}; got {depth}": depth < 2
            or all(count % depth for count in self.ranks)
            for depth in self.stages
        }
        rules |= {
            f"--microbatches must be 1 to --batch {self.batch}; got {m}": m is not None and not 1 <= m <= self.batch,
            **sizes(self, memory="16GiB"),
            f"--trial-timeout-s must be above 0; got {self.trial_timeout_s:g}": not self.trial_timeout_s > 0,
            "app.bench starts the ranks of its runs itself: start it once, without torchrun, mpirun or srun": (
                find_launch() is not None
            ),
        }
        errors = self.data.validate() + broken(rules)
        for strategy in self.strategies:
            unread = error_of(functools.partial(StrategySpec.parse, strategy))
            errors += unread or StrategySpec.parse(strategy).errors(self.ranks)
        if not errors and not self.cases():
            errors.append(
                f"nothing to measure: single runs on one rank, everything else on several; got --ranks {ranks} and "
                f"--strategies {' '.join(self.strategies)}"
            )
        return errors
