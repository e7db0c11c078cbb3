"""``--tile slide`` from end to end: sizes, scores, boxes and resume; and what it refuses."""

from __future__ import annotations

import csv
import shutil
from pathlib import Path

import pytest

from app import index
from app.launch.rank_guard import Interrupt
from app.planning.whole_slides import as_square
from app.settings.run import DataSettings, RunConfig
from app.settings.strategy import StrategySettings
from pipelines.stream.augment import AugmentSettings
from pipelines.tiles.index import TileTable
from pipelines.tiles.index_settings import IndexSettings
from tests.app.conftest import Train, summary_of
from tests.app.test_train import equal, model_of

CUT = ("--tile", "slide", "--mpp", "4", "--stride", "8")
STEP = ("--parallel", "single", "--batch", "2", "--microbatches", "2", "--lr", "0.01")
TINY = ("--model", "tests.helpers.tiny_models:classifier", "--norm", "frozen", "--head", "attention")
QUIET = ("--twin-steps=0", "--validate-every=1000")


def config(strategy: StrategySettings, augment: str = "none") -> RunConfig:
    settings = AugmentSettings(augment=augment)  # type: ignore[arg-type]
    return RunConfig(DataSettings(Path()), IndexSettings(tile="slide"), augmentation=settings, strategy=strategy)


@pytest.fixture(scope="module")
def indexed(classify_slides: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an index of the slides, as a run takes over."""
    out = tmp_path_factory.mktemp("indexed")
    assert index.main(["--slides", str(classify_slides), *CUT, "--out", str(out)]) == 0
    return out


@pytest.mark.long
def test_trained_in_boxes_and_resumed_bit_for_bit(
    classify_slides: Path, indexed: Path, train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for out in ("whole", "parts"):
        shutil.copytree(indexed, tmp_path / out)
    common = ("--slides", classify_slides, *CUT, *STEP, *TINY, *QUIET, "--stream", "64")
    done = train(*common, "--steps", "4", "--out", tmp_path / "whole")
    assert done.returncode == 0, done.stderr
    assert "whole slides as tiles: " in done.stdout
    table = TileTable.load(tmp_path / "whole" / "tiles.parquet")
    assert len(table) == len(table.slides) == 6
    summary = summary_of(tmp_path / "whole")
    assert (summary["tile_px"], summary["images"]) == ("slide", 8)
    assert summary["tile_sides_px"][2] == list(table.largest)
    per_image = summary["pixels_per_second"] / summary["images_per_second"]
    assert table.pixels.min() <= per_image <= table.pixels.max()
    with (tmp_path / "whole" / "predictions.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert all(row["tiles"] == "1" for row in rows)
    assert summary["metrics"]["slide_auc"] == summary["metrics"]["tile_auc"]
    assert "Whole slides: smallest, median, largest" in (tmp_path / "whole" / "report.html").read_text()

    asked = iter([False, True])
    with monkeypatch.context() as patch:
        patch.setattr(Interrupt, "requested", property(lambda _: next(asked), lambda _, value: None), raising=False)
        done = train(*common, "--steps", "4", "--out", tmp_path / "parts")
    assert (done.returncode, summary_of(tmp_path / "parts")["steps"]) == (0, 2), done.stderr
    done = train(*common, "--steps", "4", "--resume", "--out", tmp_path / "parts")
    assert (done.returncode, summary_of(tmp_path / "parts")["steps"]) == (0, 4), done.stderr
    assert equal(model_of(tmp_path / "parts"), model_of(tmp_path / "whole"))


def test_slides_that_cannot_fit_are_refused_with_what_to_do(
    classify_slides: Path, indexed: Path, train: Train, tmp_path: Path
) -> None:
    for parallel, memory in (("single", "1MiB"), ("auto", "10KiB")):
        shutil.copytree(indexed, tmp_path / parallel)
        done = train(
            *("--slides", classify_slides, *CUT, *STEP, *TINY, "--parallel", parallel, "--memory", memory),
            *("--steps", "1", "--out", tmp_path / parallel),
        )
        assert done.returncode == 1
        assert "the largest slide has " in done.stderr
        assert "and --stream 512, or ask for a coarser --mpp" in done.stderr


@pytest.mark.parametrize(
    ("asked", "fault"),
    [
        (
            config(StrategySettings(parallel="single", batch=4, microbatches=2)),
            "--batch 4 needs --microbatches 4; got 2",
        ),
        (config(StrategySettings(parallel="fsdp", ranks=2, batch=2)), "and not fsdp, whose ranks"),
        (config(StrategySettings(ranks=2, batch=2)), "got --parallel auto"),
        (config(StrategySettings(parallel="single", batch=1), "cpu"), "--augment cpu varies tiles of one size"),
    ],
)
def test_faults_of_settings(asked: RunConfig, fault: str) -> None:
    (only,) = asked.validate()
    assert fault in only


def test_a_square_of_as_many_px_stands_for_the_largest_slide() -> None:
    square = as_square(config(StrategySettings(parallel="single", batch=1)), (4096, 1000)).index
    assert (square.side, square.stride) == (2048, None)
