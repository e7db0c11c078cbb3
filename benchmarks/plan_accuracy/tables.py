"""Tables of predictions next to measurements, and of choices next to the best that was measured.

Takes rows, one for each strategy of a problem; gives Markdown, and the targets that were missed. The time of a step is
the median over the steps.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.plan_accuracy.problems import ALL, MIB
from benchmarks.results import markdown_table

MEDIAN_ERROR, WORST_ERROR, BYTES_ERROR = 0.10, 0.25, 0.05
"""Of seconds, and of bytes in the median."""
WITHIN, OF_ALL = 0.05, 0.9
"""How much slower than the best measured strategy a choice may be, and the share of choices that have to be so."""

Row = dict[str, Any]
"""problem, name, listed (by the problem), chosen (by the planner), predicted_s, steps_s, and bytes by rank: predicted,
in use, kept by autograd (None where that is not counted), and growth, which has what the heap reserves."""


def step_s(row: Row) -> float:
    return statistics.median(row["steps_s"])


def time_error(row: Row) -> float:
    return float(row["predicted_s"] / step_s(row) - 1)


def byte_errors(row: Row) -> list[float]:
    """Return the error of each rank; groups of ranks are alike."""
    predicted = row["predicted_bytes"]
    return [predicted[rank % len(predicted)] / used - 1 for rank, used in enumerate(row["in_use_bytes"])]


def errors_table(rows: Sequence[Row]) -> str:
    """Return a row for every strategy, and the median and the worst error of all."""
    lines = [
        (
            str(ALL[row["problem"]]),
            row["name"],
            f"{row['predicted_s']:.2f}",
            f"{step_s(row):.2f}",
            f"{time_error(row):+.0%}",
            *(_mib(row[key]) for key in ("predicted_bytes", "in_use_bytes")),
            f"{max(byte_errors(row), key=abs):+.0%}",
            *(_mib(row[key]) for key in ("kept_bytes", "growth_bytes")),
        )
        for row in rows
    ]
    header = ["problem", "strategy", "step, s: predicted", "measured", "error", "peak MiB by rank: predicted"]
    header += ["measured", "largest error", "of it kept by autograd", "with the heap's reserve"]
    times, sizes = _errors(rows)
    about = (
        f"{len(rows)} combinations. Step time: median error {statistics.median(times):.1%}, worst {max(times):.1%}. "
        f"Peak bytes of a rank: median error {statistics.median(sizes):.1%}, worst {max(sizes):.1%}.\n"
    )
    return about + "\n" + markdown_table(header, lines)


def choices_table(rows: Sequence[Row]) -> str:
    """Return a row for every problem: the fastest strategy that was measured, and the planner's."""
    lines, good, problems = [], 0, list(_problems(rows))
    for own in problems:
        problem, best = ALL[own[0]["problem"]], _best(own)
        fitting = sum(_fits(row) for row in own)
        cells = [str(problem), f"{fitting} of {len(own)}", best["name"], f"{step_s(best):.2f}"]
        chosen = next((row for row in own if row["chosen"]), None)
        if chosen is None:
            lines.append([*cells, "nothing", "", "", ""])
            continue
        good += _is_good(chosen, best)
        peak = f"{max(chosen['growth_bytes']) / MIB:.0f}"
        lines.append([*cells, chosen["name"], f"{step_s(chosen):.2f}", f"{_lag(chosen, best):+.1%}", peak])
    header = ("problem", "fit", "fastest measured", "s", "planner's choice", "s", "slower", "peak MiB")
    about = f"{good} of {len(problems)} choices within {WITHIN:.0%} of the best measured, and within the memory.\n"
    return about + "\n" + markdown_table(header, lines)


def missed(rows: Sequence[Row]) -> list[str]:
    """Return the targets that were missed."""
    times, sizes = _errors(rows)
    limits = (
        ("median error of step time", statistics.median(times), MEDIAN_ERROR),
        ("worst error of step time", max(times), WORST_ERROR),
        ("median error of peak bytes", statistics.median(sizes), BYTES_ERROR),
    )
    faults = [f"{what}: {error:.1%}, asked {asked:.0%}" for what, error, asked in limits if error > asked]
    choosing = [own for own in _problems(rows) if any(row["chosen"] for row in own)]
    bad = [own for own in choosing if not any(row["chosen"] and _is_good(row, _best(own)) for row in own)]
    if len(bad) > (1 - OF_ALL) * len(choosing):
        names = ", ".join(own[0]["problem"] for own in bad)
        faults.append(f"choices within {WITHIN:.0%}: not {names}")
    return faults


def _problems(rows: Sequence[Row]) -> Iterator[list[Row]]:
    """Yield the rows of each problem."""
    for name in dict.fromkeys(row["problem"] for row in rows):
        yield [row for row in rows if row["problem"] == name]


def _fits(row: Row) -> bool:
    return bool(max(row["growth_bytes"]) <= ALL[row["problem"]].memory_bytes)


def _best(rows: Sequence[Row]) -> Row:
    """Return the fastest within the memory, or the nearest to it."""
    fitting = [row for row in rows if _fits(row)]
    return min(fitting, key=step_s) if fitting else min(rows, key=lambda row: max(row["growth_bytes"]))


def _lag(row: Row, best: Row) -> float:
    return step_s(row) / step_s(best) - 1


def _is_good(row: Row, best: Row) -> bool:
    return _fits(row) and _lag(row, best) <= WITHIN


def _errors(rows: Sequence[Row]) -> tuple[list[float], list[float]]:
    """Return the errors of all steps, and of all ranks."""
    return [abs(time_error(row)) for row in rows], [abs(error) for row in rows for error in byte_errors(row)]


def _mib(sizes: Sequence[int | None]) -> str:
    return " ".join("?" if size is None else f"{size / MIB:.0f}" for size in sizes)
