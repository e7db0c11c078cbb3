"""The YAML files that a user starts from train two steps on small slides; those of the demo are run by its own test."""

import pytest

from tests.app.conftest import ROOT, summary_of

NUCLEI = ROOT / "data" / "nuclei"
SMALLER = {
    "slide_labels": (
        *("--model", "resnet18", "--tile", "64", "--bag", "4", "--batch", "8", "--microbatches", "2", "--test", "0"),
    ),
    "segment_folds": ("--fold", "4", "--annotations", NUCLEI / "masks", "--batch", "2"),
    "large_tiles": ("--tile", "128", "--batch", "2", "--microbatches", "2", "--model", "resnet18"),
    "whole_slides": ("--mpp", "4", "--stream", "256", "--validation", "0.4"),
}
"""Put after ``--config``: fewer and smaller tiles, and models that need no download."""

TRAINED = {
    "slide_labels": ("classify", "single", 1),
    "segment_folds": ("segment", "single", 1),
    "large_tiles": ("classify", "spatial", 4),
    "whole_slides": ("classify", "single", 1),
}


def test_every_config_is_run():
    files = {path.stem for path in (ROOT / "configs").glob("*.yaml")}
    assert files == {*SMALLER, *(name for name in files if name.startswith("demo_"))}


@pytest.mark.process
@pytest.mark.parametrize("name", SMALLER)
def test_config_trains(name, classify_slides, train, train_ranks, tmp_path):
    slides = NUCLEI / "images" if name == "segment_folds" else classify_slides
    start = train_ranks if name == "large_tiles" else train
    length = ("--epochs", "1") if name == "slide_labels" else ("--steps", "2")
    quick = (*length, "--patience", "0", "--validation-tiles=2")
    config = ("--config", ROOT / "configs" / f"{name}.yaml", "--slides", slides, "--out", tmp_path)
    start(*config, *SMALLER[name], *quick)
    summary = summary_of(tmp_path)
    assert (summary["task"], summary["strategy"], summary["ranks"]) == TRAINED[name]
    assert (summary["status"], summary["steps"]) == ("completed", 2)  # of bags, two slides each of the four that train
    assert summary["metrics"]["loss"] > 0
