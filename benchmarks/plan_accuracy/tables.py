"""The tables of the README: predictions beside measurements, and choices beside the best that was measured.

Takes what ``run.py`` wrote, problem by problem; gives Markdown, and what was asked and not reached. The time of a step
is the median over the steps.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.plan_accuracy.problems import MIB, Problem, named
from benchmarks.results import markdown_table

MEDIAN_ERROR = 0.10
WITHIN = 0.05
"""How much slower than the best measured a choice may be."""
OF_TEN = 0.9


@dataclass(frozen=True)
class Entry:
    """One way to train, predicted and measured.

    Attributes:
        listed: among the candidates of the problem; else the planner's own find.
        predicted_bytes, in_use_bytes, kept_bytes: by rank, at the peak; what autograd keeps is None where that is not
            counted.
        growth_bytes: by how much a rank's process is larger, memory included that is kept after tensors gave it back.
    """

    name: str
    listed: bool
    predicted_s: float
    predicted_bytes: Sequence[int]
    steps_s: Sequence[float]
    growth_bytes: Sequence[int]
    in_use_bytes: Sequence[int]
    kept_bytes: Sequence[int | None]

    @property
    def step_s(self) -> float:
        return statistics.median(self.steps_s)

    @property
    def time_error(self) -> float:
        return self.predicted_s / self.step_s - 1

    @property
    def byte_errors(self) -> list[float]:
        """By rank; groups of ranks are alike."""
        group = len(self.predicted_bytes)
        return [self.predicted_bytes[rank % group] / used - 1 for rank, used in enumerate(self.in_use_bytes)]


@dataclass(frozen=True)
class Outcome:
    """A problem, and what came of it.

    Attributes:
        chosen: name of the planner's own choice among all it knows; None where nothing fits.
    """

    problem: Problem
    entries: Sequence[Entry]
    chosen: str | None

    @classmethod
    def from_json(cls, name: str, found: Mapping[str, Any]) -> Outcome:
        return cls(named(name), [Entry(**entry) for entry in found["entries"]], found["chosen"])

    @property
    def fitting(self) -> list[Entry]:
        """Those that stayed within the memory."""
        return [entry for entry in self.entries if max(entry.growth_bytes) <= self.problem.memory_bytes]

    @property
    def best(self) -> Entry:
        """The fastest that was measured within the memory; the one nearest to it where none was."""
        if not self.fitting:
            return min(self.entries, key=lambda entry: max(entry.growth_bytes))
        return min(self.fitting, key=lambda entry: entry.step_s)

    @property
    def choice(self) -> Entry | None:
        return next((entry for entry in self.entries if entry.name == self.chosen), None)

    @property
    def choice_of_listed(self) -> Entry | None:
        """What the planner would choose among the problem's candidates alone."""
        fit = [e for e in self.entries if e.listed and max(e.predicted_bytes) <= self.problem.memory_bytes]
        return min(fit, key=lambda entry: entry.predicted_s, default=None)

    def lag(self, entry: Entry) -> float:
        """By how much ``entry`` is slower than the best."""
        return entry.step_s / self.best.step_s - 1

    def over(self, entry: Entry) -> bool:
        """It took more than the memory."""
        return max(entry.growth_bytes) > self.problem.memory_bytes


def errors_table(outcomes: Sequence[Outcome]) -> str:
    """A row for every combination, and the median and worst of all."""
    lines = []
    for outcome in outcomes:
        for entry in outcome.entries:
            lines.append(
                (
                    str(outcome.problem),
                    entry.name,
                    f"{entry.predicted_s:.2f}",
                    f"{entry.step_s:.2f}",
                    f"{entry.time_error:+.0%}",
                    _mib(entry.predicted_bytes),
                    _mib(entry.in_use_bytes),
                    f"{max(entry.byte_errors, key=abs):+.0%}",
                    _mib(entry.kept_bytes),
                    _mib(entry.growth_bytes),
                )
            )
    header = (
        "problem",
        "strategy",
        "step, s: predicted",
        "measured",
        "error",
        "peak MiB by rank: predicted",
        "measured",
        "largest error",
        "of it kept by autograd",
        "with the heap's reserve",
    )
    times, bytes_ = _errors(outcomes)
    said = (
        f"{len(lines)} combinations. Step time: median error {statistics.median(times):.1%}, worst {max(times):.1%}. "
        f"Peak bytes of a rank: median error {statistics.median(bytes_):.1%}, worst {max(bytes_):.1%}.\n"
    )
    return said + "\n" + markdown_table(header, lines)


def choices_table(outcomes: Sequence[Outcome]) -> str:
    """A row for every problem."""
    lines = []
    for outcome in outcomes:
        choice, listed, best = outcome.choice, outcome.choice_of_listed, outcome.best
        lines.append(
            (
                str(outcome.problem),
                f"{len(outcome.fitting)} of {len(outcome.entries)}",
                best.name,
                f"{best.step_s:.2f}",
                choice.name if choice else "nothing",
                f"{choice.step_s:.2f}" if choice else "",
                f"{outcome.lag(choice):+.1%}" if choice else "",
                f"{max(choice.growth_bytes) / MIB:.0f}" if choice else "",
                f"{listed.name}, {outcome.lag(listed):+.1%}" if listed else "nothing",
            )
        )
    header = (
        "problem",
        "fit",
        "fastest measured",
        "s",
        "planner's choice",
        "s",
        "slower",
        "peak MiB",
        "choice among the measured",
    )
    good = sum(_good(outcome) for outcome in outcomes)
    said = f"{good} of {len(outcomes)} choices within {WITHIN:.0%} of the best measured, and within the memory.\n"
    return said + "\n" + markdown_table(header, lines)


def missed(outcomes: Sequence[Outcome]) -> list[str]:
    """What was asked and not reached."""
    faults = []
    for what, errors in zip(("step time", "peak bytes"), _errors(outcomes), strict=True):
        if statistics.median(errors) > MEDIAN_ERROR:
            faults.append(f"median error of {what}: {statistics.median(errors):.1%}, asked {MEDIAN_ERROR:.0%}")
    good = [outcome for outcome in outcomes if _good(outcome)]
    if len(good) < OF_TEN * len(outcomes):
        others = ", ".join(outcome.problem.name for outcome in outcomes if outcome not in good)
        faults.append(f"choices within {WITHIN:.0%}: {len(good)} of {len(outcomes)}; not {others}")
    for outcome in outcomes:
        if outcome.choice is not None and outcome.over(outcome.choice):
            faults.append(f"{outcome.problem.name}: {outcome.choice.name} took more than the memory")
    return faults


def _good(outcome: Outcome) -> bool:
    choice = outcome.choice
    return choice is not None and not outcome.over(choice) and outcome.lag(choice) <= WITHIN


def _errors(outcomes: Sequence[Outcome]) -> tuple[list[float], list[float]]:
    """Of all steps, and of all ranks."""
    entries = [entry for outcome in outcomes for entry in outcome.entries]
    return [abs(entry.time_error) for entry in entries], [abs(e) for entry in entries for e in entry.byte_errors]


def _mib(sizes: Sequence[int | None]) -> str:
    return " ".join("?" if size is None else f"{size / MIB:.0f}" for size in sizes)
