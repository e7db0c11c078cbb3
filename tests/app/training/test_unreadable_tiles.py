"""Tiles that cannot be read while a run trains: left out of scores, counted, and the end of a run made of stand-ins.

Ranks are threads of this process, as in ``test_parallel_train``.
"""

from __future__ import annotations

import copy
import csv
import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
import torch
from numpy.typing import NDArray

from app.checkpoint.file import load_checkpoint
from app.launch.place import RankPlace
from app.launch.rank_guard import Interrupt
from app.launch.watchdog import Watchdog
from app.pages.run_files import read_run
from app.pages.run_page import render
from app.settings.cli import RunError
from app.settings.run import DataSettings, ModelSettings, RunConfig, ScoreSettings, StrategySettings, StreamSettings
from app.training import loop as loop_module
from app.training import model as model_module
from app.training import session as session_module
from app.training.batches import tiles_in_order
from app.training.dataset import Dataset, prepare
from app.training.loop import TrainingLoop
from app.training.outcome import IdleTime, Outcome, Throughput
from app.training.run_folder import RunFolder
from app.training.session import build_session
from app.training.summary import RunSummary
from app.training.validation import spread
from parallel.comm.communicator import Communicator
from parallel.comm.thread_comm import run_on_threads
from pipelines.backends.tiff_page import Tag
from pipelines.backends.tiff_tags import read_tiff
from pipelines.catalog.catalog import SlideSpec
from pipelines.catalog.failures import FailedSlides
from pipelines.slides.geometry import Region
from pipelines.slides.slide import Pixels, Slide, TileReadError
from pipelines.tiles.index_settings import IndexSettings
from tests.helpers import tiny_models
from tests.helpers.lanes import long_where
from tests.helpers.tiff_damage import tile_extent, with_bytes

torch.manual_seed(0)
MODELS = {"tiny": tiny_models.classifier(2), "segmenter": tiny_models.segmenter(2)}


@pytest.fixture(autouse=True)
def one_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads share the generator that weights are drawn with, so they are drawn once."""
    monkeypatch.setattr(model_module, "build_model", lambda name, **_: copy.deepcopy(MODELS[name]))


class BrokenSlide:
    """A slide some of whose tiles cannot be read; anything else is the slide's own."""

    def __init__(self, slide: Slide, bad: frozenset[tuple[int, int]] | None) -> None:
        self._slide = slide
        self._bad = bad

    def read(self, region: Region, out: Pixels | None = None) -> Pixels:
        if self._bad is None or (region.l0_x, region.l0_y) in self._bad:
            raise TileReadError(f"{self._slide.path.name}: tile at {region.l0_x}, {region.l0_y} is damaged")
        return self._slide.read(region, out=out)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._slide, name)


@dataclasses.dataclass(frozen=True)
class BrokenSpec(SlideSpec):
    """``bad``: corners of the tiles that cannot be read; None: all of them."""

    bad: frozenset[tuple[int, int]] | None = None

    def open(self) -> Slide:
        return BrokenSlide(super().open(), self.bad)  # type: ignore[return-value]  # __getattr__ has the rest


def broken(dataset: Dataset, bad: dict[str, frozenset[tuple[int, int]] | None]) -> Dataset:
    """``dataset`` whose slides ``bad`` have unreadable tiles."""
    specs = [
        BrokenSpec(s.slide_id, s.path, s.mpp, s.backend, bad=bad[s.slide_id]) if s.slide_id in bad else s
        for s in dataset.specs
    ]
    return dataclasses.replace(dataset, specs=tuple(specs))


def run_config(slides: Path, out: Path, *, steps: int = 2, model: str = "tiny", **strategy: Any) -> RunConfig:
    return RunConfig(
        DataSettings(slides),
        IndexSettings(tile=128),
        net=ModelSettings(model),
        strategy=StrategySettings(batch=4, microbatches=2, device="cpu", **strategy),
        score=ScoreSettings(validation_tiles=5),
        out=out,
        steps=steps,
        twin_steps=0,
    )


def train(config: RunConfig, dataset: Dataset) -> RunFolder:
    """The run folder of a run on threads, which ends as ``app.train`` ends it."""
    folder = RunFolder(config.out)
    config.out.mkdir(exist_ok=True)
    (config.out / "config.yaml").write_text("{}")

    def rank(communicator: Communicator, _: None) -> None:
        mesh = RankPlace(communicator, torch.device("cpu"))
        watchdog = Watchdog(communicator.rank, stuck_s=60)
        strategy = config.strategy.to_strategy("cpu")
        session = build_session(config, strategy, dataset, mesh, FailedSlides(folder.failed_slides), watchdog)
        loop = TrainingLoop(session, folder, Interrupt())
        summary = RunSummary(session, folder, loop.outcome, loop.memory, 0)
        try:
            loop.run()
        except RunError as fault:
            summary.failed(str(fault), 0)
            raise
        finally:
            session.close()
        if communicator.rank == 0:  # what finished() would write; its sums over ranks are not what is tested
            summary._write(loop.outcome.status, [[0], [0], [0], [], *([size] for size in summary._on_host)], None)

    run_on_threads(config.strategy.world, rank, timeout_s=60)
    return folder


def prepared(slides: Path, out: Path, **more: Any) -> Dataset:
    config = run_config(slides, out, **more)
    return prepare(config, RunFolder(out), lambda line: None)


@pytest.fixture(scope="module")
def data(classify_slides: Path, tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return prepared(classify_slides, tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def drawn(segment_slides: Path, tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return prepared(segment_slides, tmp_path_factory.mktemp("drawn"), model="segmenter")


def predictions(folder: RunFolder) -> dict[str, dict[str, str]]:
    with folder.predictions.open(newline="") as file:
        return {row["slide"]: row for row in csv.DictReader(file)}


def summary_of(folder: RunFolder) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(folder.summary.read_text())
    return found


def bad_tiles(dataset: Dataset) -> tuple[str, str, NDArray[np.int64]]:
    """Two validation slides, the first to be unreadable, the second in one tile, and the row of that tile."""
    lost, torn = dataset.splits.slides("val")[:2]
    validated = spread(dataset, dataset.rows("val"), 5)
    of_torn = validated[dataset.tiles.slide[validated] == dataset.tiles.slides.index(torn)]
    return lost, torn, of_torn[:1]


CASES = [
    pytest.param("classify", {"parallel": "ddp", "ranks": 2}, marks=pytest.mark.long),
    pytest.param("classify", {"parallel": "gpipe", "ranks": 4, "stages": 2}, marks=pytest.mark.long),
    pytest.param("segment", {}, marks=pytest.mark.long),
    ("segment", {"parallel": "gpipe", "ranks": 2}),
    pytest.param("segment", {"parallel": "master", "ranks": 2}, marks=pytest.mark.long),
    pytest.param("segment", {"parallel": "ddp", "ranks": 2, "stream": "48"}, marks=pytest.mark.long),
]


@pytest.mark.parametrize(("task", "strategy"), CASES, ids=lambda case: str(case).strip("{}").replace("'", ""))
def test_unreadable_tiles_take_no_part_in_scores(
    task: str,
    strategy: dict[str, Any],
    classify_slides: Path,
    data: Dataset,
    drawn: Dataset,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Once, a tile of another slide was scored in place of each: a slide of zeros had a prediction and an AUC."""
    dataset, model = (data, "tiny") if task == "classify" else (drawn, "segmenter")
    splits = {s: "val" if k < 2 else "train" for k, s in enumerate(sorted(dataset.tiles.slides, reverse=True))}
    dataset = dataclasses.replace(dataset, splits=dataclasses.replace(dataset.splits, split=splits))
    lost, torn, bad_row = bad_tiles(dataset)
    corner = (int(dataset.tiles.l0_x[bad_row[0]]), int(dataset.tiles.l0_y[bad_row[0]]))

    def config(name: str) -> RunConfig:
        return run_config(classify_slides, tmp_path / name, model=model, **strategy)

    damaged = train(config("damaged"), broken(dataset, {lost: None, torn: frozenset({corner})}))

    def readable(dataset: Dataset, rows: NDArray[np.int64], per_slide: int) -> NDArray[np.int64]:
        kept = spread(dataset, rows, per_slide)
        return kept[(dataset.tiles.slide[kept] != dataset.tiles.slides.index(lost)) & (kept != bad_row[0])]

    monkeypatch.setattr(session_module, "spread", readable)
    expected = train(config("readable"), dataset)

    assert summary_of(damaged)["metrics"] == pytest.approx(summary_of(expected)["metrics"])
    found = predictions(damaged)
    scores = [name for name in found[lost] if name.startswith(("score_", "dice_", "prediction"))]
    assert all(found[lost][name] == "" for name in scores)
    assert found[lost]["tiles"] == "0"
    last = scores[-1]
    assert float(found[torn][last] or -1) == pytest.approx(float(predictions(expected)[torn][last] or -1), rel=1e-6)
    assert found[torn]["tiles"] == predictions(expected)[torn]["tiles"] == "4"
    summary = summary_of(damaged)
    assert summary["status"] == "completed"
    assert summary["validation_tiles"] == 10
    assert summary["validation_tiles_unreadable"] == 6
    assert summary["slides_without_score"] == [lost]
    told = [(row[0], row[1]) for row in FailedSlides(damaged.failed_slides).rows()]
    assert told.count((torn, "validate")) == 1
    assert told.count((lost, "validate")) == 5
    page = render(read_run(damaged.path))
    assert "6 of 10" in page
    assert "no tile could be read" in page


@pytest.mark.parametrize("prefetch", long_where([0, 2], 0))
def test_replaced_training_tiles_are_counted_and_their_labels_follow(
    prefetch: int, classify_slides: Path, data: Dataset, tmp_path: Path
) -> None:
    """Of two ranks, the first with the pixels and the second with the labels, each replaced tile counts once."""
    bad = data.splits.slides("train")[0]
    config = run_config(classify_slides, tmp_path / "run", steps=6, parallel="gpipe", ranks=2)
    config = dataclasses.replace(config, stream=StreamSettings(device_prefetch=prefetch))
    folder = train(config, broken(data, {bad: None}))
    summary = summary_of(folder)
    alone = train(run_config(classify_slides, tmp_path / "alone", steps=6), broken(data, {bad: None}))
    assert summary["final_loss"] == pytest.approx(summary_of(alone)["final_loss"], rel=1e-5)
    rows = data.rows("train")
    stream = tiles_in_order(config, data, rows).shuffle(config.stream.open_slides)
    drawn = rows[stream.order.epoch(0)[:24]]
    asked = np.count_nonzero(data.tiles.slide[drawn] == data.tiles.slides.index(bad))
    assert 0 < asked < 12
    assert (summary["status"], summary["images"], summary["tiles_replaced"]) == ("completed", 24, asked)
    assert f"{asked} of 24" in render(read_run(folder.path))


def test_a_tile_that_is_damaged_in_one_box_is_found_when_it_is_read(
    classify_slides: Path, data: Dataset, tmp_path: Path
) -> None:
    """Before any of its boxes is computed: the whole tile is replaced, as without boxes."""
    torn = data.splits.slides("train")[0]
    (spec,) = (spec for spec in data.specs if spec.slide_id == torn)
    row = np.flatnonzero(data.tiles.slide == data.tiles.slides.index(torn))[0]
    page = read_tiff(spec.path).pages[0]
    side = page.number(Tag.TILE_WIDTH, 0)
    number = data.tiles.l0_y[row] // side * page.grid[0] + data.tiles.l0_x[row] // side
    offset, count = tile_extent(spec.path, int(number))
    damaged = dataclasses.replace(spec, path=with_bytes(spec.path, tmp_path / spec.path.name, offset, bytes(count)))
    dataset = dataclasses.replace(data, specs=tuple(damaged if s is spec else s for s in data.specs))
    runs = {}
    for name, strategy in (("plain", {}), ("boxes", {"stream": "40", "offload_host": "64KiB"})):
        folder = train(run_config(classify_slides, tmp_path / name, steps=8, **strategy), dataset)
        told = [line[:2] for line in FailedSlides(folder.failed_slides).rows()]
        runs[name] = summary_of(folder), sorted(told)
    (plain, lost), (boxes, lost_too) = runs.values()
    assert 0 < boxes["tiles_replaced"] == plain["tiles_replaced"] < 16
    assert lost == lost_too
    assert {slide for slide, _ in lost} == {torn}
    assert boxes["final_loss"] == pytest.approx(plain["final_loss"], rel=1e-4)
    assert boxes["file_bytes"][0] > 4 * 128 * 128 * 3, "tiles lie in a file, too"
    assert [path.name for path in (tmp_path / "boxes").iterdir() if path.name.startswith("maps")] == []


def test_a_run_of_replaced_tiles_fails_early(
    classify_slides: Path, data: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop_module, "JUDGED_FROM", 20)
    train_slides = data.splits.slides("train")
    config = run_config(classify_slides, tmp_path / "run", steps=100_000, parallel="ddp", ranks=2)
    with pytest.raises(RunError, match="more than half of the tiles"):
        train(config, broken(data, dict.fromkeys(train_slides[1:])))
    summary = summary_of(RunFolder(config.out))
    assert summary["status"] == "failed"
    assert summary["images"] == 20
    assert summary["tiles_replaced"] > summary["images"] / 2


def test_a_short_run_of_replaced_tiles_does_not_end_completed(
    classify_slides: Path, data: Dataset, tmp_path: Path
) -> None:
    config = run_config(classify_slides, tmp_path / "run", steps=3)
    with pytest.raises(RunError, match="more than half of the tiles"):
        train(config, broken(data, dict.fromkeys(data.splits.slides("train")[1:])))
    folder = RunFolder(config.out)
    assert summary_of(folder)["status"] == "failed"
    state = load_checkpoint(folder.last)  # of its last step: a further --resume looks at it, too
    resumed = Outcome(Throughput(4), IdleTime(1), images=state["images"], replaced=state["replaced"])
    with pytest.raises(RunError, match="more than half of the tiles"):
        resumed.check_replaced(folder.failed_slides)


def test_with_no_readable_validation_tile_there_is_no_score(
    classify_slides: Path, data: Dataset, tmp_path: Path
) -> None:
    config = run_config(classify_slides, tmp_path / "run", parallel="ddp", ranks=2)
    folder = train(config, broken(data, dict.fromkeys(data.splits.slides("val"))))
    summary = summary_of(folder)
    assert summary["status"] == "completed"
    assert set(summary["metrics"].values()) == {None}
    assert summary["best"] is None
    assert summary["validation_tiles_unreadable"] == summary["validation_tiles"]


def test_a_mask_of_another_slide_costs_its_slide_only(segment_slides: Path, tmp_path: Path) -> None:
    """Where tiles get their class from it, it once ended the command."""
    slides, out = tmp_path / "slides", tmp_path / "run"
    shutil.copytree(segment_slides, slides)
    mask = sorted((slides / "annotations").glob("*.tif"))[0]
    tifffile.imwrite(mask, np.ones((64, 512), np.uint8))
    config = run_config(slides, out)
    config = dataclasses.replace(config, data=DataSettings(slides, task="classify"))
    dataset = prepare(config, RunFolder(out), lambda line: None)
    assert len(dataset.specs) == len(dataset.tiles.slides) == 3
    assert dataset.tile_labels is not None
    assert len(dataset.tile_labels) == len(dataset.tiles)
    (row,) = FailedSlides(out / "failed_slides.csv").rows()
    assert row[:2] == (mask.name.split(".")[0], "annotation")
    assert "must have the proportions of its slide" in row[2]


def test_folders_called_like_splits_are_the_split(classify_slides: Path, tmp_path: Path) -> None:
    """They were once two classes, train and val."""
    slides, out = tmp_path / "slides", tmp_path / "run"
    with (classify_slides / "labels.csv").open(newline="") as file:
        label = {row["slide"]: row["label"] for row in csv.DictReader(file)}
    paths = sorted(classify_slides.glob("*.tif"))
    for k, path in enumerate(paths):
        folder = slides / ("train" if k < 4 else "val") / label[path.stem.removesuffix(".ome")]
        folder.mkdir(parents=True, exist_ok=True)
        (folder / path.name).symlink_to(path)
    said: list[str] = []
    dataset = prepare(run_config(slides, out), RunFolder(out), said.append)
    assert set(dataset.classes) == set(label.values())
    assert dataset.splits.slides("val") == tuple(path.stem for path in paths[4:])
    assert "split by the folders train, val" in said
    assert any(str(line).startswith("slides by split: train 4, val 2, test 0; patients unknown") for line in said)
    assert prepare(run_config(slides, out), RunFolder(out), said.append).splits == dataset.splits
