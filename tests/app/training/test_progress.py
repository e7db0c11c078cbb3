"""What is shown while slides are indexed: one line, however long their names are."""

from __future__ import annotations

import io
import re
from types import SimpleNamespace

import pytest
from rich.console import Console

from app.training import progress as module
from app.training.progress import IndexProgress, shortened
from pipelines.tiles.index import SlideDone

NAMES = [f"{k:064x}" for k in range(6)]


def done(k: int, *, failed: bool = False) -> SlideDone:
    return SlideDone(k, 6, NAMES[k - 1], "13 tiles", failed)


@pytest.mark.parametrize(
    ("name", "cells", "expected"),
    [
        ("slide_1", 7, "slide_1"),
        ("slide_12", 7, "sli…_12"),
        ("slide_12", 6, "sli…12"),
        ("漢字漢字漢字", 9, "漢字…漢字"),
    ],
)
def test_a_name_loses_its_middle(name: str, cells: int, expected: str) -> None:
    assert shortened(name, cells) == expected


def test_elsewhere_a_line_comes_now_and_then_and_at_the_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = iter([0.0, 4.0, 10.0, 12.0, 19.0, 20.0, 24.0])
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: next(now)))
    said: list[str] = []
    with IndexProgress(said.append) as progress:
        progress("3 slides are there already")
        for k in range(1, 7):
            progress(done(k, failed=k == 4))
    printed = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in printed] == [
        "indexing: 2/6 slides, 12/min, 0:00:20 left",
        "4/6",
        "indexing: 5/6 slides, 15/min, 0:00:04 left, 1 failed",
    ]
    assert all(len(line) <= 80 and "000…000" in line for line in (printed[0], printed[2]))
    assert printed[1] == f"4/6  {NAMES[3]}: 13 tiles"
    assert said == ["3 slides are there already", "indexed 6 slides in 0:00:24, 1 failed"]


def test_only_the_first_slides_that_fail_fill_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with IndexProgress(lambda line: None) as progress:
        for k in range(1, 100):
            progress(SlideDone(k, 100, f"slide_{k}", "failed at open: empty", True))
    assert len(capsys.readouterr().out.splitlines()) == module.FAILED_SHOWN


@pytest.mark.parametrize("width", [40, 80])
def test_on_a_terminal_it_is_one_line_that_changes(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(module, "_on_terminal", lambda: True)
    monkeypatch.setattr(module, "Console", lambda: Console(file=screen, force_terminal=True, width=width))
    with IndexProgress(lambda line: None) as progress:
        for k in range(1, 6):
            progress(done(k))
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.getvalue())
    assert shown.count("\n") == 1  # when it ends
    assert max(map(len, re.split("[\r\n]", shown))) <= width
    assert "5/6 slides" in shown
