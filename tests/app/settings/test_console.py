"""Tables on a terminal keep to its width and break wide columns alone; elsewhere no cell is broken."""

from __future__ import annotations

import re
import sys

import pytest

from app.settings.console import print_table

HEADERS = ("strategy", "fits", "peak bytes")
ROW = ("mast +recompute block +offload", "2.67 GiB over", "12.3 GiB 2.49 GiB 7.42 GiB 12.1 GiB")


@pytest.mark.parametrize("terminal", [True, False])
def test_wide_columns_are_broken_on_a_terminal_alone(
    terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    monkeypatch.setenv("COLUMNS", "60")
    print_table("a title", HEADERS, [ROW])
    blank, title, *lines = re.sub(r"\x1b\[[\d;]*m", "", capsys.readouterr().out).splitlines()
    assert (blank, title.strip()) == ("", "a title")
    assert (max(map(len, lines)) <= 60) == terminal
    assert sum("2.67 GiB over" in line for line in lines) == 1
    assert (len(lines) == 2) != terminal
