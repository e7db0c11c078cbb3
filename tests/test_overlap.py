"""benchmarks/overlap with made-up figures: what is run, and that noise is not called a difference."""

from __future__ import annotations

import pytest

from benchmarks.overlap.findings import findings, rows_of
from benchmarks.overlap.settings import KNOBS, arguments, settings_of

A, B, C = KNOBS[:3]


def test_few_are_run_in_every_combination_and_many_alone_in_pairs_and_at_once() -> None:
    assert [len(on) for on in settings_of((A, B, C))] == [0, 1, 1, 1, 2, 2, 2, 3]
    assert [len(on) for on in settings_of(KNOBS)] == [0] + 5 * [1] + 10 * [2] + [5]
    assert arguments((A, B), (B,)) == ["--developer", "read-ahead=1KiB", "--developer", "read-threads=2"]


@pytest.mark.parametrize(
    ("off", "alone", "both", "verdict"),
    [
        ((10.0, 10.1), (12.0, 12.1), (14.0, 14.2), "beats the best of them alone"),
        ((10.0, 10.1), (12.0, 12.1), (11.5, 11.6), "fight"),
        ((10.0, 10.1), (12.0, 12.1), (12.0, 12.9), "no difference"),
        ((10.0, 10.1), (7.0, 7.1), (8.0, 8.1), "no better than nothing on"),
        ((10.0, 10.1), (12.0,), (14.0, 14.2), "one repeat says nothing"),
        ((10.0, 10.1), (), (14.0, 14.2), "nothing to be held against"),
        ((10.0, 10.1), (12.0, 12.1), (), "did not run"),
    ],
)
def test_two_beside_the_better_of_them(
    off: tuple[float, ...], alone: tuple[float, ...], both: tuple[float, ...], verdict: str
) -> None:
    rows = rows_of({(): off, (A,): alone, (B,): (6.0, 6.1) if alone else (), (A, B): both})
    assert rows[-1]["verdict"] == verdict


def test_what_is_said() -> None:
    rows = rows_of({(): (10.0, 10.1), (A,): (12.0, 12.4), (B,): (10.0, 10.3), (A, B): (12.1, 12.5)})
    assert findings(rows)[0] == "Alone, what helps: read-ahead 1GiB."
    assert findings(rows)[-1] == "Not slower beyond what repeats differ by, with fewer on: read-ahead 1GiB."
    assert findings(rows_of({(): (10.0,), (A,): (12.0,)}))[0].startswith("With one repeat nothing can be said")
