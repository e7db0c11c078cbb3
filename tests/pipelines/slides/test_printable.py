"""Text of files that would steer a terminal."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipelines.catalog.failures import FailedSlides
from pipelines.slides.slide import SlideError, printable, printable_values

EVIL = ["\x1b[2J", "\x9b31m", "\x07", "\r", "\u202e", "\u2066", "\u2028", "\x7f", "\x00", "\ud800"]


@pytest.mark.parametrize("evil", EVIL)
def test_what_a_terminal_obeys_is_escaped(evil: str, tmp_path: Path) -> None:
    text = f"a{evil}b"
    assert printable(text).isprintable()
    assert printable(printable(text)) == printable(text)
    assert printable_values({text: [text, (text, 1)], "x": None}) == {
        printable(text): [printable(text), (printable(text), 1)],
        "x": None,
    }
    assert evil not in str(SlideError(f"x.svs: {text}\n  tiled: no"))
    assert "\n" in str(SlideError(f"x.svs: {text}\n  tiled: no"))
    failed = FailedSlides(tmp_path / "failed_slides.csv")
    failed.add("s", "open", f"what the file says: {text}")
    assert evil not in failed.path.read_text(errors="surrogateescape")


@pytest.mark.parametrize("text", ["", "Tumor: Positive", "b\u00f6sartig <1%", "\u80bf", "a\u00a0b", "\u0627\u200d"])
def test_other_text_stays(text: str) -> None:
    assert printable(text) == text
