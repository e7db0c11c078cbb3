"""Names of files of predictions."""

from __future__ import annotations

import unicodedata
from pathlib import Path

import pytest

from app.prediction.prediction_folder import PredictionFolder, file_names


@pytest.mark.parametrize(
    "classes",
    [
        ["<1%", ">1%", "=1%"],
        ["grade 1", "grade_1", "grade/1"],
        ["a", "A", "a~2", "A~2", "a_2"],
        ["x.y", "x_y"],
        ["caf\u00e9", "CAF\u00c9", "cafe\u0301"],
        ["t" * 300, "t" * 301],
        ["\u6b63\u5e38", "\u80bf\u7624", "", " ", ".."],
        ["Stra\u00dfe", "STRASSE"],
    ],
)
def test_each_class_has_a_file_of_its_own(classes: list[str]) -> None:
    """Heat maps of <1% and >1% were once one file, that of the class written last."""
    parts = file_names(classes)
    assert len({unicodedata.normalize("NFKC", parts[name]).casefold() for name in classes}) == len(classes)
    assert all(len(part.encode()) < 200 and not set(part) & set('<>:"/\\|?*.%') for part in parts.values())


def test_slides_and_classes_with_dots_are_told_apart() -> None:
    folder, part = PredictionFolder(Path()), file_names(["b.c", "c"])
    assert folder.heat_map("a", part["b.c"]) != folder.heat_map("a.b", part["c"])
