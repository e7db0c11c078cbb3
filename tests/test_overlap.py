"""benchmarks/overlap with made-up figures: noise is not called a difference, and knobs are set for what is asked."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from benchmarks.overlap import run
from benchmarks.overlap.findings import (
    Rounds,
    everything_over_best_alone,
    level_rows,
    verdict,
)
from benchmarks.overlap.settings import (
    CASES,
    EXHAUSTIVE,
    MACHINES,
    OFF,
    ON,
    Setting,
    turned_on,
)
from benchmarks.overlap.tune import Cost, Demand, costs_of, demands_of, tune, tuned_rows

BUSY = MACHINES[0]
EVERYTHING = turned_on(*ON)


def rows_of(
    case: str, speeds: Mapping[Setting, Iterable[float]], machine: str = BUSY, parallel: str = "ddp"
) -> list[dict[str, Any]]:
    figures = {"lost_s": 1.0, "wait": 0.0, "between": 0.0, "cpu_s": 1.0, "sums": 2.0}
    return [
        {"case": case, "machine": machine, "parallel": parallel, "setting": [*setting], "round": number}
        | {**figures, "images_s": speed}
        for setting, of_rounds in speeds.items()
        for number, speed in enumerate(of_rounds)
    ]


@pytest.mark.parametrize(
    ("ratios", "said"),
    [
        ([1.1, 1.01, 1.2, 1.1, 1.3], "faster"),
        ([0.9, 0.99, 0.8, 0.9, 0.7], "slower"),
        ([1.1, 0.99, 1.2, 1.1, 1.3], "no difference"),
        ([1.1, 1.01, 1.2, 1.1], "too few rounds"),
    ],
)
def test_all_of_five_rounds_have_to_agree(ratios: list[float], said: str) -> None:
    assert verdict(ratios) == said


def test_levels_are_compared_within_a_round() -> None:
    drift = [10.0, 20.0, 40.0, 80.0, 160.0]
    speeds = {OFF: drift, OFF._replace(buckets=4): [1.1 * speed for speed in drift]}
    rows = level_rows(Rounds.of(rows_of("resnet18@32", speeds)), "resnet18@32", BUSY)
    first, four = [row for row in rows if row[0] == "buckets"]
    assert first[:5] == ("buckets", "0", "40", "1", "")
    assert four[:5] == ("buckets", "4", "44", "1.10 (1.10-1.10)", "faster")


def test_the_best_alone_is_chosen_by_the_other_rounds() -> None:
    """A knob that was lucky in two of four rounds is not held against everything in these two."""
    speeds: dict[Setting, Iterable[float]] = {turned_on(knob): [10.0] * 4 for knob in ON} | {EVERYTHING: [10.0] * 4}
    speeds[turned_on("prefetch")] = [20.0, 20.0, 8.0, 8.0]
    ratios = everything_over_best_alone(Rounds.of(rows_of("m@32", speeds)), "m@32", BUSY)
    assert ratios == [1.0, 1.0, 1.25, 1.25]


def made_up(setting: Setting) -> Cost:
    """Checkpoints cost what they cost, less in two phases; reading ahead helps, many sums do not."""
    cost = (0.5 if setting.write == "two-phase" else 2.0) / setting.every
    step_s = 1.0 + cost + 0.3 / setting.read_ahead + 0.1 * (setting.buckets == 1) - 0.05 * (setting.prefetch == 1)
    return Cost(8 / step_s, setting.every * step_s)


@pytest.mark.parametrize("lost_s", [None, 1.5, 8.0, 0.01])
@pytest.mark.parametrize("images_s", [None, 5.0, 7.0, 100.0])
def test_descent_finds_the_best_with_few_measurements(lost_s: float | None, images_s: float | None) -> None:
    demand = Demand(lost_s, images_s)
    chosen, count = tune(made_up, demand)
    best = max(EXHAUSTIVE, key=lambda setting: demand.merit(made_up(setting)))
    assert demand.merit(made_up(chosen)) == pytest.approx(demand.merit(made_up(best)))
    assert count <= 40


def test_the_choice_is_judged_by_rounds_that_did_not_choose() -> None:
    """One setting is twice as fast in the rounds that choose and the slowest in the others."""
    lucky = EXHAUSTIVE[-1]
    rows = rows_of("m@32", {s: [20.0, 5.0, 20.0, 5.0] if s == lucky else [10.0] * 4 for s in EXHAUSTIVE})
    tuned = list(tuned_rows(Rounds.of(rows), "m@32"))
    assert len(tuned) == 2 * len(list(demands_of({s: made_up(s) for s in EXHAUSTIVE})))
    assert all(float(row[5]) in (1.0, 2.0) for row in tuned)
    half = [row for row in rows if row["round"] == 0]
    assert not list(tuned_rows(Rounds.of(half), "m@32"))


def test_costs_are_of_rounds_with_all_settings() -> None:
    rows = rows_of("m@32", {setting: [10.0, 100.0] if setting == OFF else [10.0] for setting in EXHAUSTIVE})
    assert {cost.images_s for cost in costs_of(Rounds.of(rows), "m@32").values()} == {10.0}


def test_rounds_of_a_later_run_have_new_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES["resnet18@32"]
    (tmp_path / case.name / "pictures").mkdir(parents=True)
    rows = [*rows_of(case.name, {OFF: [10.0] * 3}), *rows_of("other@32", {OFF: [10.0] * 9})]
    (tmp_path / run.ROWS).write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    asked: list[Any] = []
    monkeypatch.setattr(run, "run_on_ranks", lambda _, __, argument, **___: asked.append(argument["rounds"]))
    run.measure(case, [], 2, tmp_path)
    assert asked == [[3, 5]]
