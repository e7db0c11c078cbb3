"""Labels held beside scores: missing values, and the class map that the model was trained with."""

from __future__ import annotations

from pathlib import Path

from app.evaluation.labelled import labelled_slides, read_truth
from pipelines.labels.class_names import ClassMap


def test_missing_labels_take_no_part_and_names_are_mapped(tmp_path: Path) -> None:
    path = tmp_path / "labels.csv"
    path.write_text("slide,label\nd,blurred\nb,normal\na,Tumor\nc,nan\n")
    rows = [{"slide": slide, "score_normal": 0.5, "score_tumour": 0.5} for slide in "abcd"]
    class_map = ClassMap.parse(("Tumor=tumour", "blurred=ignore"))
    found = labelled_slides(rows, ("normal", "tumour"), read_truth(path, needs_labels=True), {}, 1, class_map)
    assert found.slides == ("a", "b")
    assert found.cases.label.tolist() == [1, 0]
    assert "2 predicted slides without a label: c, d" in found.left_out[0]
