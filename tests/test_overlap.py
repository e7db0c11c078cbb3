"""benchmarks/overlap with made-up figures: noise is not called a difference, and knobs are set for what is asked."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pytest

from benchmarks.overlap.findings import (
    Rounds,
    answer,
    combination_rows,
    everything_over_best_alone,
    hypothesis_rows,
    level_rows,
    verdict,
)
from benchmarks.overlap.settings import (
    EXHAUSTIVE,
    MACHINES,
    OFF,
    ON,
    Setting,
    Window,
    level_settings,
    turned_on,
    windows_of,
)
from benchmarks.overlap.tune import Cost, Demand, demands_of, tune, tuned_rows

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


def alone_and_together(best: Iterable[float], together: Iterable[float]) -> dict[Setting, Iterable[float]]:
    """Speeds in five rounds: nothing on, each knob alone, of which checkpoints are the best, and all together."""
    speeds = {turned_on(knob): [10.0] * 5 for knob in ON} | {OFF: [10.0] * 5}
    return speeds | {turned_on("write"): best, EVERYTHING: together}


def test_each_level_is_measured_once_with_the_others_off_and_with_the_others_on() -> None:
    settings = level_settings(ON)
    assert len(settings) == len(set(settings))
    assert {OFF, EVERYTHING, OFF._replace(buckets=4), EVERYTHING._replace(prefetch=2)} <= set(settings)
    assert {OFF._replace(every=1), EVERYTHING._replace(every=20, write="blocking")} <= set(settings)
    assert len(EXHAUSTIVE) == 3 * 2 * 4 * 3 * 3


def test_one_rank_has_no_buckets_and_pipedream_is_measured_by_name() -> None:
    windows = list(windows_of(MACHINES, ON))
    assert all(w.setting.buckets == 0 for w in windows if w.parallel == "single")
    assert sum(w.parallel == "pipedream" for w in windows) == 4
    assert Window(BUSY, "ddp", OFF._replace(every=20)).steps == 20


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


def test_the_hypothesis_is_answered_from_the_table() -> None:
    small = rows_of("resnet18@32", alone_and_together([12.0] * 5, [9.0] * 5))
    large = rows_of("resnet50@224", alone_and_together([12.0] * 5, [12.5] * 5))
    rounds = Rounds.of(small + large)
    said = answer(rounds)
    assert "slower than the best knob alone in 1 of 2" in said
    assert "resnet18@32 0.75, resnet50@224 1.04. The hypothesis does not hold here" in said
    assert [row[3] for row in hypothesis_rows(rounds)] == ["slower", "faster"]
    assert answer(Rounds.of(small)).endswith("The hypothesis holds here.")
    assert "too few rounds" in answer(Rounds.of(row for row in small if row["round"] < 4))


def test_a_combination_compares_the_gain_of_its_knobs_on_one_rank_and_under_the_strategy() -> None:
    alone = rows_of("m@32", {OFF: [10.0] * 5, turned_on("write"): [12.0] * 5}, MACHINES[1], "single")
    under = rows_of("m@32", {OFF: [20.0] * 5, turned_on("write"): [18.0] * 5}, BUSY, "pipedream")
    (row,) = combination_rows(Rounds.of(alone + under), "m@32")
    assert row[1:5] == ("10", "12", "20", "18")
    assert row[5:] == ("1.20 (1.20-1.20)", "0.90 (0.90-0.90)", "slower")


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


def test_what_is_missing_comes_before_what_is_wanted() -> None:
    slow, fast = Cost(4.0, 1.0), Cost(8.0, 9.0)
    assert Demand(2.0, None).merit(slow) > Demand(2.0, None).merit(fast)
    assert Demand(10.0, None).merit(fast) > Demand(10.0, None).merit(slow)
    assert Demand(None, 5.0).merit(fast) > Demand(None, 5.0).merit(slow)
    assert Demand(None, 3.0).merit(slow) > Demand(None, 3.0).merit(fast)


def test_the_choice_is_judged_by_rounds_that_did_not_choose() -> None:
    """One setting is twice as fast in the rounds that choose and the slowest in the others."""
    lucky = EXHAUSTIVE[-1]
    rows = rows_of("m@32", {s: [20.0, 5.0, 20.0, 5.0] if s == lucky else [10.0] * 4 for s in EXHAUSTIVE})
    tuned = list(tuned_rows(Rounds.of(rows), "m@32"))
    assert len(tuned) == 2 * len(list(demands_of({s: made_up(s) for s in EXHAUSTIVE})))
    assert all(float(row[5]) in (1.0, 2.0) for row in tuned)
    half = [row for row in rows if row["round"] == 0]
    assert not list(tuned_rows(Rounds.of(half), "m@32"))
