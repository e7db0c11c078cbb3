"""Set the knobs for what a user asks: at most so many seconds of work lost by a crash, at least so many images/s.

    python -m benchmarks.overlap.tune --lost-seconds 2 --images-per-second 40 [--case resnet18@32]

Coordinate descent over the levels: one knob after the other takes its best level with the others as they are, until
none changes. Costs are measured ones: the command looks them up in the exhaustive table that ``run`` measured.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from benchmarks.overlap.findings import Rounds
from benchmarks.overlap.settings import EXHAUSTIVE, LEVELS, MACHINES, OFF, Setting, Window, label
from benchmarks.results import parser_of


class Cost(NamedTuple):
    """Figures of a setting: images/s, and the seconds of work that a crash loses at most."""

    images_s: float
    lost_s: float


class Demand(NamedTuple):
    """Limits that a user states, or None. With ``lost_s`` the fastest setting is wanted, otherwise the one that loses
    least."""

    lost_s: float | None
    images_s: float | None

    def merit(self, cost: Cost) -> tuple[float, float]:
        """Return how well ``cost`` meets the demand: first by what is missing of it, then by what is wanted."""
        missing = 0.0
        if self.lost_s is not None:
            missing += max(0.0, cost.lost_s / self.lost_s - 1)
        if self.images_s is not None:
            missing += max(0.0, self.images_s / cost.images_s - 1)
        return -missing, cost.images_s if self.lost_s is not None else -cost.lost_s


def tune(cost_of: Callable[[Setting], Cost], demand: Demand, start: Setting = OFF) -> tuple[Setting, int]:
    """Return the setting where no change of one knob alone meets the demand better, and how many were measured."""
    costs: dict[Setting, Cost] = {}

    def merit(setting: Setting) -> tuple[float, float]:
        if setting not in costs:
            costs[setting] = cost_of(setting)
        return demand.merit(costs[setting])

    best = start
    # The interval of checkpoints comes last: only with the other knobs set may a short one be as fast as is asked.
    knobs = sorted(LEVELS, key=lambda knob: knob == "every")
    while True:
        before = best
        for knob in knobs:
            best = max((best, *(best._replace(**{knob: level}) for level in LEVELS[knob])), key=merit)
        if best == before:
            return best, len(costs)


def costs_of(rounds: Rounds, case: str, first: int = 0, step: int = 1) -> dict[Setting, Cost]:
    """Return the medians of every setting over each ``step``-th round that has all settings; empty: there is none."""
    measured = {setting: rounds.get((case, Window(MACHINES[0], "ddp", setting)), {}) for setting in EXHAUSTIVE}
    numbers = sorted(set.intersection(*(set(by_round) for by_round in measured.values())))[first::step]
    return {
        setting: Cost(*(statistics.median(by_round[k][what] for k in numbers) for what in Cost._fields))
        for setting, by_round in measured.items()
        if numbers
    }


def demands_of(costs: Mapping[Setting, Cost]) -> Iterator[Demand]:
    """Yield demands from hard to easy for what was measured."""
    lost = sorted(cost.lost_s for cost in costs.values())
    fastest = max(cost.images_s for cost in costs.values())
    for share in (0.1, 0.5, 1.0):
        yield Demand(lost[round(share * (len(lost) - 1))], None)
    for share in (0.95, 0.8):
        yield Demand(None, share * fastest)
    yield Demand(lost[len(lost) // 4], 0.8 * fastest)


TUNED_COLUMNS = ("lost s, at most", "images/s, at least", "chosen by descent", "measured", "best of the table")
TUNED_COLUMNS += ("images/s, chosen over best", "lost s, chosen over best")


def tuned_rows(rounds: Rounds, case: str) -> Iterator[tuple[str, ...]]:
    """Yield a row for each demand. Descent and the whole table choose by one half of the rounds and are compared by the
    other half, then the other way round: the best of many is the luckiest in the rounds that choose it."""
    halves = [costs_of(rounds, case, k, 2) for k in (0, 1)]
    if not all(halves):
        return
    for choosing, judging in (halves, halves[::-1]):
        for demand in demands_of(choosing):
            chosen, count = tune(choosing.__getitem__, demand)
            best = max(choosing, key=lambda setting: demand.merit(choosing[setting]))
            asked = ("-" if value is None else f"{value:.3g}" for value in demand)
            speed, lost = (ours / theirs for ours, theirs in zip(judging[chosen], judging[best], strict=True))
            yield (*asked, label(chosen), f"{count} of {len(EXHAUSTIVE)}", label(best), f"{speed:.2f}", f"{lost:.2f}")


def main() -> None:
    from benchmarks.overlap.run import read_rows

    parser = parser_of(__doc__, writes=False)
    parser.add_argument("--lost-seconds", type=float, help="work that a crash may lose, at most")
    parser.add_argument("--images-per-second", type=float, help="at least")
    parser.add_argument("--case", default="resnet18@32", help="model@px of the table")
    asked = parser.parse_args()
    costs = costs_of(Rounds.of(read_rows()), asked.case)
    if not costs:
        sys.exit(f"no exhaustive table of {asked.case} yet: python -m benchmarks.overlap.run --exhaustive")
    demand = Demand(asked.lost_seconds, asked.images_per_second)
    chosen, count = tune(costs.__getitem__, demand)
    cost = costs[chosen]
    print(f"{label(chosen)}: {cost.images_s:.3g} images/s, {cost.lost_s:.2f} s lost at most; {count} settings measured")
    if demand.merit(cost)[0] < 0:
        sys.exit("this is the nearest; no change of one knob meets what was asked")


if __name__ == "__main__":
    main()
