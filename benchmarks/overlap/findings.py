"""Compare settings round by round, and answer whether everything together is worse than one knob alone.

Takes rows of ``measure``; gives tables and a paragraph. Ratios are of two windows of one round; one is called faster or
slower where all of at least five rounds agree (two-sided sign test, p = 1/16), otherwise nothing is claimed.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from benchmarks.overlap.settings import LEVELS, MACHINES, OFF, ON, Setting, Window, turned_on

MIN_ROUNDS = 5
FASTER, SLOWER, SAME, FEW = "faster", "slower", "no difference", "too few rounds"
PARALLEL_OF = {machine: "single" if machine == MACHINES[1] else "ddp" for machine in MACHINES}
Ratios = Sequence[float]


class Rounds(dict[tuple[str, Window], dict[int, Mapping[str, Any]]]):
    """Rows by case and window, then by round."""

    @classmethod
    def of(cls, rows: Iterable[Mapping[str, Any]]) -> Rounds:
        rounds = cls()
        for row in rows:
            key = row["case"], Window(row["machine"], row["parallel"], Setting(*row["setting"]))
            rounds.setdefault(key, {})[row["round"]] = row
        return rounds

    @property
    def cases(self) -> list[str]:
        return list(dict.fromkeys(case for case, _ in self))

    def median(self, case: str, window: Window, what: str = "images_s") -> float:
        return statistics.median(row[what] for row in self[case, window].values())

    def ratios(self, case: str, ours: Window, theirs: Window) -> list[float]:
        """Return images/s of ``ours`` over those of ``theirs`` in each round; empty where one was not measured."""
        first, second = self.get((case, ours), {}), self.get((case, theirs), {})
        return [first[k]["images_s"] / second[k]["images_s"] for k in sorted(first.keys() & second.keys())]


def verdict(ratios: Ratios) -> str:
    """Return what can be said of the first of two windows against the second."""
    if len(ratios) < MIN_ROUNDS:
        return FEW
    return FASTER if min(ratios) > 1 else SLOWER if max(ratios) < 1 else SAME


def spread(ratios: Ratios) -> str:
    """Return the median and the range of ``ratios`` as text."""
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})" if ratios else "-"


def knobs_on(machine: str) -> list[str]:
    """Return the knobs that do anything on ``machine``."""
    return [knob for knob in ON if not (PARALLEL_OF[machine] == "single" and knob == "buckets")]


LEVEL_COLUMNS = ("knob", "level", "images/s alone", "x off", "", "x off, others on", " ", "CPU s a step", "sums")
LEVEL_COLUMNS += ("waits for pictures",)


def level_rows(rounds: Rounds, case: str, machine: str) -> Iterator[tuple[str, ...]]:
    """Yield a row for each level of each knob, alone and with the others on, under ``LEVEL_COLUMNS``."""
    everything, parallel = turned_on(*knobs_on(machine)), PARALLEL_OF[machine]
    for knob in knobs_on(machine):
        levels = [v for v in LEVELS[knob] if (case, Window(machine, parallel, OFF._replace(**{knob: v}))) in rounds]
        for level in levels if len(levels) > 1 else ():
            alone, off, among, without = (
                Window(machine, parallel, start._replace(**{knob: value}))
                for start in (OFF, everything)
                for value in (level, LEVELS[knob][0])
            )
            cells: list[str] = []
            for ratios in (rounds.ratios(case, alone, off), rounds.ratios(case, among, without)):
                compared = level != LEVELS[knob][0] and len(ratios) > 0
                cells += [spread(ratios), verdict(ratios)] if compared else ["1" if ratios else "-", ""]
            figures = [rounds.median(case, alone, what) for what in ("images_s", "cpu_s", "sums", "wait")]
            speed, cpu, sums, wait = (f"{value:.3g}" for value in figures)
            yield (knob, str(level), speed, *cells, cpu, sums, f"{100 * float(wait):.0f} %")


CHECKPOINT_COLUMNS = ("every", "written", "images/s", "between steps", "lost by a crash, s", "images/s, others on")


def checkpoint_rows(rounds: Rounds, case: str, machine: str) -> Iterator[tuple[str, ...]]:
    """Yield a row for each number of steps between checkpoints and each way to write them."""
    everything = turned_on(*knobs_on(machine))
    for every in LEVELS["every"]:
        for write in LEVELS["write"]:
            off, on = (
                Window(machine, PARALLEL_OF[machine], start._replace(every=every, write=write))
                for start in (OFF, everything)
            )
            if (case, off) in rounds and (case, on) in rounds:
                speed, between, lost = (rounds.median(case, off, what) for what in ("images_s", "between", "lost_s"))
                among = rounds.median(case, on)
                yield str(every), write, f"{speed:.3g}", f"{100 * between:.0f} %", f"{lost:.2f}", f"{among:.3g}"


class Combination(NamedTuple):
    """A strategy and knobs that a reference text runs together."""

    name: str
    parallel: str
    knobs: tuple[str, ...]


COMBINATIONS = (
    Combination("two-phase checkpoints with data parallelism", "ddp", ("write",)),
    Combination("prefetch with data parallelism", "ddp", ("read_ahead", "prefetch")),
    Combination("two-phase checkpoints with PipeDream", "pipedream", ("write",)),
    Combination("prefetch with PipeDream", "pipedream", ("read_ahead", "prefetch")),
)
COMBINATION_COLUMNS = ("combination", "neither, images/s", "knobs", "strategy", "both", "x by the knobs alone")
COMBINATION_COLUMNS += ("x by the knobs, under the strategy", "")


def combination_rows(rounds: Rounds, case: str) -> Iterator[tuple[str, ...]]:
    """Yield a row for each combination: on one rank with an idle core, and on two ranks."""
    for name, parallel, knobs in COMBINATIONS:
        windows = [
            Window(machine, strategy, setting)
            for machine, strategy in ((MACHINES[1], "single"), (MACHINES[0], parallel))
            for setting in (OFF, turned_on(*knobs))
        ]
        if all((case, window) in rounds for window in windows):
            alone, under = (rounds.ratios(case, windows[k + 1], windows[k]) for k in (0, 2))
            speeds = (f"{rounds.median(case, window):.3g}" for window in windows)
            yield (name, *speeds, spread(alone), spread(under), verdict(under))


def everything_over_best_alone(rounds: Rounds, case: str, machine: str) -> list[float]:
    """Return images/s with every knob on over those of the best knob alone, round by round. Which knob is the best is
    decided by the other rounds, as chance favours the best of a few in the rounds that choose it."""
    parallel, knobs = PARALLEL_OF[machine], knobs_on(machine)
    alone = [rounds.get((case, Window(machine, parallel, turned_on(knob))), {}) for knob in knobs]
    everything = rounds.get((case, Window(machine, parallel, turned_on(*knobs))), {})
    common = sorted(everything.keys() & set.intersection(*(set(of_round) for of_round in alone)))
    ratios = []
    for k in common if len(common) > 1 else ():
        best = max(alone, key=lambda of_round: statistics.median(of_round[j]["images_s"] for j in common if j != k))
        ratios.append(everything[k]["images_s"] / best[k]["images_s"])
    return ratios


HYPOTHESIS_COLUMNS = ("model, px", "machine", "everything over the best knob alone", "", "everything over nothing")


def hypothesis_rows(rounds: Rounds) -> Iterator[tuple[str, ...]]:
    """Yield a row for each case and machine, under ``HYPOTHESIS_COLUMNS``."""
    for case in rounds.cases:
        for machine in MACHINES:
            if ratios := everything_over_best_alone(rounds, case, machine):
                parallel = PARALLEL_OF[machine]
                everything = Window(machine, parallel, turned_on(*knobs_on(machine)))
                over_off = rounds.ratios(case, everything, Window(machine, parallel, OFF))
                yield case, machine, spread(ratios), verdict(ratios), spread(over_off)


def answer(rounds: Rounds) -> str:
    """Return one paragraph on "all together is worse than one alone, above all for small models"."""
    measured = {
        (case, machine): ratios
        for case in rounds.cases
        for machine in MACHINES
        if (ratios := everything_over_best_alone(rounds, case, machine))
    }
    if min(map(len, measured.values()), default=0) < MIN_ROUNDS:
        return f"Everything at once against one knob alone: too few rounds to answer; measure {MIN_ROUNDS} or more."
    verdicts = [verdict(ratios) for ratios in measured.values()]
    counts = {said: verdicts.count(said) for said in (SLOWER, FASTER, SAME)}
    text = (
        f"Everything at once is slower than the best knob alone in {counts[SLOWER]} of {len(verdicts)} combinations of "
        f"model, size and machine, faster in {counts[FASTER]}, and no different in {counts[SAME]}. "
    )
    holds = counts[SLOWER] > len(verdicts) / 2
    of_case = {case: [r for (of, _), ratios in measured.items() if of == case for r in ratios] for case in rounds.cases}
    medians = ", ".join(f"{case} {statistics.median(ratios):.2f}" for case, ratios in of_case.items() if ratios)
    return f"{text}Median ratio by model: {medians}. The hypothesis {'holds' if holds else 'does not hold'} here."
