"""The folder of predictions: files of slides that are named by paths, and other slides of the same names."""

import pytest

from app.prediction.prediction_folder import PredictionFolder
from app.training.run_slides import opening
from pipelines.catalog.catalog import SlideSpec
from pipelines.catalog.handles import SlideState
from pipelines.tiles.index import _write_overlay


def test_files_of_a_slide_that_is_named_by_its_path_have_a_folder(tmp_path):
    folder = PredictionFolder(tmp_path)
    folder.file("masks", "case/1").write_text("")
    folder.heat_map("case/1", "dark").write_text("")
    (tmp_path / "tissue").mkdir()
    assert _write_overlay(tmp_path, SlideSpec("case/1", tmp_path / "1.dcm"), b"a picture") is None


def test_another_slide_of_the_same_name_is_refused(tmp_path):
    """Its start deleted the earlier predictions."""
    old, other = (SlideSpec("a", tmp_path / name / "a.png") for name in ("old", "other"))
    for spec in (old, other):
        spec.path.parent.mkdir()
        spec.path.write_text(str(spec.path))
    folder = PredictionFolder(tmp_path / "out")
    folder.finish({"slide": "a"}, SlideState.of(old.path), {"path": str(old.path)}, opening(old))
    with pytest.raises(ValueError, match=r"other slides of the same names; use another --out:\n  a: .*old.a\.png is"):
        folder.done([other])
    assert folder.done([old]) == {"a"}
    old.path.replace(tmp_path / "moved.png")
    assert folder.done([SlideSpec("a", tmp_path / "moved.png")]) == {"a"}
    assert folder.done([other]) == set()  # the slide was replaced
