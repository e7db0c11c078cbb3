"""Sweeps with made-up figures: what is run, what is said of it, and that noise is not called a difference."""

from __future__ import annotations

import json
from typing import Any

import pytest

from app.benchmark.knobs import KNOBS, Knob, Setting, alone, chosen, fitting, on_in, settings_of
from app.benchmark.sweep import NOTHING, Measured, difference, sweep_findings, sweep_rows, sweep_table
from app.settings.cli import _flags
from app.settings.run import RunConfig
from app.settings.strategy import StrategySettings

A, B, C = (Knob(f"--{name}", "0", ("1",), f"{name} overlaps") for name in "abc")


def setting(knobs: tuple[Knob, ...], *on: str) -> Setting:
    return tuple((knob.flag, knob.on[0] if knob.name in on else knob.off) for knob in knobs)


def measured(knobs: tuple[Knob, ...], speeds: dict[str, tuple[float, ...]]) -> list[Measured]:
    return [Measured(setting(knobs, *on), given) for on, given in speeds.items()]


def verdicts(knobs: tuple[Knob, ...], speeds: dict[str, tuple[float, ...]]) -> list[str]:
    return [row["verdict"] for row in sweep_rows(knobs, measured(knobs, speeds))]


def test_every_knob_is_a_flag_of_a_run_and_takes_its_values() -> None:
    flags = {name for name, _ in _flags(RunConfig)}
    assert {knob.name.replace("-", "_") for knob in KNOBS} <= flags
    assert len(settings_of(KNOBS)) == 1 + 5 + 10 + 1


def test_few_knobs_are_run_in_every_combination_in_order_of_how_many_are_on() -> None:
    found = settings_of((A, B, C))
    assert len(set(found)) == len(found) == 8
    assert [len(on_in((A, B, C), each)) for each in found] == [0, 1, 1, 1, 2, 2, 2, 3]
    assert found[0] == (("--a", "0"), ("--b", "0"), ("--c", "0"))
    assert settings_of(()) == [()]
    assert settings_of((A,)) == [(("--a", "0"),), (("--a", "1"),)]


def test_many_are_run_alone_in_pairs_and_at_once() -> None:
    found = settings_of((A, B, C), most=7)
    assert len(found) == 1 + 3 + 3 + 1
    assert settings_of((A, B), most=3) == settings_of((A, B))  # all at once is the only pair
    many = tuple(Knob(f"--k{number}", "0", ("1",), "") for number in range(6))
    on = [len(on_in(many, each)) for each in settings_of(many)]
    assert on == [0] + 6 * [1] + 15 * [2] + [6]


def test_values_of_one_knob_are_never_combined() -> None:
    threads = Knob("--threads", "1", ("2", "4"), "")
    found = [on_in((A, threads), each) for each in settings_of((A, threads))]
    assert found == [
        (),
        (("--a", "1"),),
        (("--threads", "2"),),
        (("--threads", "4"),),
        (("--a", "1"), ("--threads", "2")),
        (("--a", "1"), ("--threads", "4")),
    ]
    assert alone((A, threads), ("--threads", "4")) == (("--a", "0"), ("--threads", "4"))


def test_knobs_are_chosen_by_name_with_values_of_ones_own() -> None:
    first, second = chosen({"device-prefetch": ("0", "1", "3"), "read-ahead": ()})
    assert (first.flag, first.off, first.on) == ("--device-prefetch", "0", ("1", "3"))
    assert second == KNOBS[0]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"speed": ()}, "a sweep knows read-ahead, read-threads, device-prefetch, .*; got 'speed'"),
        ({"read-ahead": ("1GiB",)}, "read-ahead is varied over two values or more, each once; got 1GiB"),
        ({"read-threads": ("2", "2")}, "read-threads is varied over two values or more, each once; got 2 2"),
    ],
)
def test_what_is_no_choice_is_refused(values: dict[str, tuple[str, ...]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        chosen(values)


@pytest.mark.parametrize(
    ("asked", "buckets"),
    [
        ({"parallel": "single"}, False),
        ({"parallel": "gpipe", "ranks": 2}, False),
        ({"parallel": "ddp", "ranks": 2}, True),
        ({"parallel": "master", "ranks": 2}, True),
    ],
)
def test_buckets_are_varied_where_gradients_are_summed(asked: dict[str, Any], buckets: bool) -> None:
    names = [knob.name for knob in fitting(KNOBS, StrategySettings(**asked))]
    assert ("gradient-buckets" in names) == buckets
    assert len(names) == 4 + buckets


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ((10.0, 10.2, 10.4), (11.0, 11.1, 11.2), -1),
        ((11.0, 11.1, 11.2), (10.0, 10.2, 10.4), 1),
        ((10.0, 10.2, 11.2), (11.0, 11.1, 11.2), 0),  # medians 0.9 apart, and one of them varies by 1.2
        ((10.0, 10.0), (10.0, 10.0), 0),
        ((10.0,), (20.0, 20.0), None),
    ],
)
def test_a_difference_is_larger_than_what_repeats_differ_by(
    first: tuple[float, ...], second: tuple[float, ...], expected: int | None
) -> None:
    assert difference(Measured((), first), Measured((), second)) == expected


def test_knobs_that_help_together() -> None:
    speeds = {"": (10.0, 10.1), "a": (12.0, 12.1), "b": (11.0, 11.1), "ab": (14.0, 14.2)}
    rows = sweep_rows((A, B), measured((A, B), speeds))
    assert [row["verdict"] for row in rows[1:]] == ["helps", "helps", "beats its best knob"]
    assert (rows[3]["label"], rows[3]["best_knob"]) == ("a 1 + b 1", "a 1")
    assert rows[3]["times_best_knob"] == pytest.approx(14.1 / 12.05)
    assert rows[3]["times_off"] == pytest.approx(14.1 / 10.05)
    assert rows[3]["images_per_second_range"] == [14.0, 14.2]
    assert (rows[0]["label"], rows[0]["on"], rows[0]["best_knob"], rows[0]["times_off"]) == (NOTHING, {}, None, 1.0)
    assert rows[1]["knobs"] == {"--a": "1", "--b": "0"}
    assert json.loads(json.dumps(rows)) == rows


@pytest.mark.parametrize(
    ("speeds", "verdict"),
    [
        ({"": (10.0, 10.1), "a": (12.0, 12.1), "b": (11.0, 11.1), "ab": (11.5, 11.6)}, "fight"),
        ({"": (10.0, 10.1), "a": (12.0, 12.1), "b": (11.0, 11.1), "ab": (12.0, 12.9)}, "no difference"),
        # Better than the better of two that hurt, and still slower than neither.
        ({"": (10.0, 10.1), "a": (7.0, 7.1), "b": (6.0, 6.1), "ab": (8.0, 8.1)}, "no better than nothing on"),
        ({"": (10.0, 10.1), "a": (12.0,), "b": (11.0, 11.1), "ab": (14.0, 14.2)}, "one repeat says nothing"),
        ({"": (10.0, 10.1), "a": (), "b": (11.0, 11.1), "ab": (14.0, 14.2)}, "nothing to be held against"),
        ({"": (10.0, 10.1), "b": (11.0, 11.1), "ab": (14.0, 14.2)}, "nothing to be held against"),
        ({"": (), "a": (12.0, 12.1), "b": (11.0, 11.1), "ab": (14.0, 14.2)}, "no better than nothing on"),
        ({"": (10.0, 10.1), "a": (12.0, 12.1), "b": (11.0, 11.1), "ab": ()}, "did not run"),
    ],
)
def test_two_knobs_beside_the_better_of_them(speeds: dict[str, tuple[float, ...]], verdict: str) -> None:
    assert verdicts((A, B), speeds)[-1] == verdict


def test_one_knob_beside_none() -> None:
    speeds = {"": (10.0, 10.4), "a": (9.0, 9.1), "b": (10.1, 10.6), "c": (13.0, 13.1)}
    assert verdicts((A, B, C), speeds)[1:] == ["hurts", "no difference", "helps"]


def test_three_knobs_are_held_against_the_best_of_the_three() -> None:
    speeds = {"": (10.0, 10.1), "a": (12.0, 12.1), "b": (9.0, 9.1), "c": (11.0, 11.1), "abc": (11.0, 11.1)}
    rows = sweep_rows((A, B, C), measured((A, B, C), speeds))
    assert (rows[-1]["best_knob"], rows[-1]["verdict"]) == ("a 1", "fight")


def test_the_table_says_which_and_how_much() -> None:
    speeds = {"": (10.0, 10.1), "a": (12.0, 12.1), "b": (11.0, 11.1), "ab": (14.0, 14.2)}
    told = sweep_table(sweep_rows((A, B), measured((A, B), speeds)))
    assert told == [
        "on          images/s  range    x nothing on  x best knob  verdict",
        "nothing on  10.1      10-10.1  1.00                       what the others are held against",
        "a 1         12.1      12-12.1  1.20                       helps",
        "b 1         11.1      11-11.1  1.10                       helps",
        "a 1 + b 1   14.1      14-14.2  1.40          1.17         beats its best knob",
        "Alone, what helps: a 1; b 1.",
        "Alone, what hurts: none.",
        "Together faster than the best of them alone: a 1 + b 1.",
        "Together slower than the best of them alone: none.",
        "Fastest: a 1 + b 1, 14.1 images/s, 1.40 times that of nothing on.",
    ]


def test_fewer_knobs_that_are_as_fast_are_named() -> None:
    speeds = {"": (10.0, 10.1), "a": (12.0, 12.4), "b": (10.0, 10.3), "ab": (12.1, 12.5)}
    told = sweep_findings(sweep_rows((A, B), measured((A, B), speeds)))
    assert told[-1] == "Not slower beyond what repeats differ by, with fewer on: a 1."


def test_of_what_was_measured_once_or_not_at_all_nothing_is_said() -> None:
    once = sweep_findings(sweep_rows((A,), measured((A,), {"": (10.0,), "a": (12.0,)})))
    assert once == ["With one repeat nothing can be said of what helps: measure twice or more."]
    rows = sweep_rows((A,), [Measured(setting((A,))), Measured(setting((A,), "a"), (), "out of memory")])
    assert [row["verdict"] for row in rows] == ["did not run", "did not run"]
    assert rows[1]["reason"] == "out of memory"
    assert sweep_table(rows)[1].split() == ["nothing", "on", "-", "did", "not", "run"]
    assert not any("Fastest" in line for line in sweep_findings(rows))
