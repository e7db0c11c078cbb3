"""Slides of a run, opened for a prediction as the run opened them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from app.settings.run import DataSettings
from app.training.run_slides import predicted_slides
from pipelines.catalog.handles import SlideState
from pipelines.tiles.index_settings import IndexSettings


@pytest.mark.parametrize(
    ("labels", "given", "mpp"),
    [
        ("other,1", {}, {"as_file": 0.5, "by_table": 0.25, "new": 0.5}),
        ("as_file,4\nby_table,4\nnew,4", {}, {"as_file": 0.5, "by_table": 0.25, "new": 4}),
        ("other,1", {"slide_mpp": 2.0}, {"as_file": 2, "by_table": 2, "new": 2}),
    ],
)
def test_labels_beside_the_slides_give_mpp_to_new_slides_only(
    tmp_path: Path, labels: str, given: dict[str, Any], mpp: dict[str, float]
) -> None:
    for name in mpp:
        (tmp_path / f"{name}.svs").write_text(name)
    (tmp_path / "labels.csv").write_text(f"slide,mpp\n{labels}\n")
    run = ("as_file", "by_table")
    columns = {
        "digest": {name: SlideState.now(tmp_path / f"{name}.svs").digest for name in run},
        "mpp": {"by_table": 0.25, "new": 1.0},
    }
    trained = DataSettings(Path("gone"), slide_mpp=0.5, mpp_table=Path("gone.csv"))
    specs = predicted_slides(trained, IndexSettings(), columns, {"slides": tmp_path, **given})
    assert {spec.slide_id: spec.mpp for spec in specs} == mpp


@pytest.mark.parametrize(("given", "scene"), [({}, 1), ({"scene": 0}, 0)])
def test_a_prediction_reads_the_scene_of_the_run(tmp_path: Path, given: dict[str, Any], scene: int) -> None:
    (tmp_path / "a.tif").write_text("a")
    trained = DataSettings(Path("gone"), scene=1)
    (spec,) = predicted_slides(trained, IndexSettings(), {}, {"slides": tmp_path, **given})
    assert spec.scene == scene
