"""Tiles that cannot be read while a run trains: left out of scores, counted, and the end of a run made of stand-ins."""

import dataclasses
import json
import shutil

import numpy as np
import pytest
import tifffile

from app.checkpoint.file import load_checkpoint
from app.pages.run_files import RunFiles
from app.pages.run_page import render
from app.settings.cli import RunError
from app.training import loop as loop_module
from app.training import session as session_module
from app.training.batches import tiles_in_order
from app.training.outcome import IdleTime, Outcome, Throughput
from app.training.run_folder import RunFolder
from app.training.validation import subsample_per_slide
from pipelines.backends.tiff_page import Tag
from pipelines.backends.tiff_tags import read_tiff
from pipelines.catalog.catalog import SlideSpec
from pipelines.catalog.table import FailedSlides
from pipelines.slides.slide import SlideError, TileReadError
from tests.app.conftest import rows_of
from tests.app.training.conftest import config_of, prepared, train_on_threads
from tests.helpers.splits import slides_in
from tests.helpers.tiff_damage import tile_extent, with_bytes


class BrokenSlide:
    """A slide some of whose tiles cannot be read; anything else is the slide's own."""

    def __init__(self, slide, bad, fault):
        self._slide, self._bad, self._fault = slide, bad, fault

    def read(self, region, out=None):
        if self._bad is None or (region.l0_x, region.l0_y) in self._bad:
            raise self._fault(f"{self._slide.path.name}: tile at {region.l0_x}, {region.l0_y} is damaged")
        return self._slide.read(region, out=out)

    def __getattr__(self, name):
        return getattr(self._slide, name)


@dataclasses.dataclass(frozen=True)
class BrokenSpec(SlideSpec):
    """``bad``: corners of the tiles that cannot be read; None: all of them. ``fault``: what reading them raises."""

    bad: frozenset | None = None
    fault: type[SlideError] = TileReadError

    def open(self):
        return BrokenSlide(super().open(), self.bad, self.fault)


def broken(dataset, bad, fault=TileReadError):
    """``dataset`` whose slides ``bad`` have unreadable tiles."""
    specs = [
        BrokenSpec(s.slide_id, s.path, s.mpp, s.backend, bad=bad[s.slide_id], fault=fault) if s.slide_id in bad else s
        for s in dataset.specs
    ]
    return dataclasses.replace(dataset, specs=tuple(specs))


def tile_config(slides, out, *, steps=2, **values):
    return config_of(slides, out, **{"batch": 4, "microbatches": 2, "validation_tiles": 5, "steps": steps, **values})


@pytest.fixture(scope="module")
def drawn(segment_slides, tmp_path_factory):
    return prepared(tile_config(segment_slides, tmp_path_factory.mktemp("drawn"), model="segmenter"))


def predictions(ran):
    return {row["slide"]: row for row in rows_of(ran.folder.predictions)}


@pytest.mark.parametrize(
    ("task", "strategy"),
    [
        ("segment", {"parallel": "gpipe", "ranks": 2}),
        pytest.param("classify", {"parallel": "ddp", "ranks": 2}, marks=pytest.mark.long),
        pytest.param("segment", {"parallel": "ddp", "ranks": 2, "stream": "48"}, marks=pytest.mark.long),
    ],
    ids=["segment-gpipe", "classify-ddp", "segment-ddp-boxes"],
)
def test_unreadable_tiles_take_no_part_in_scores(task, strategy, classify_slides, data, drawn, tmp_path, monkeypatch):
    """Once, a tile of another slide was scored in place of each: a slide of zeros had a prediction and an AUC."""
    dataset, model = (data, "tiny") if task == "classify" else (drawn, "segmenter")
    splits = {s: "val" if k < 2 else "train" for k, s in enumerate(sorted(dataset.tiles.slides, reverse=True))}
    dataset = dataclasses.replace(dataset, splits=dataclasses.replace(dataset.splits, split=splits))
    # Of two validation slides the first is unreadable, the second in one tile.
    lost, torn = slides_in(dataset.splits.split, "val")[:2]
    validated = subsample_per_slide(dataset, dataset.rows("val"), 5)
    bad_row = validated[dataset.tiles.slide[validated] == dataset.tiles.slides.index(torn)][0]
    corner = (int(dataset.tiles.l0_x[bad_row]), int(dataset.tiles.l0_y[bad_row]))

    def ran(name, dataset):
        return train_on_threads(tile_config(classify_slides, tmp_path / name, model=model, **strategy), dataset)

    def readable(dataset, rows, per_slide):
        kept = subsample_per_slide(dataset, rows, per_slide)
        return kept[(dataset.tiles.slide[kept] != dataset.tiles.slides.index(lost)) & (kept != bad_row)]

    damaged = ran("damaged", broken(dataset, {lost: None, torn: frozenset({corner})}))
    monkeypatch.setattr(session_module, "subsample_per_slide", readable)
    expected = ran("readable", dataset)

    summary, found = damaged.summary, predictions(damaged)
    assert summary["metrics"] == pytest.approx(expected.summary["metrics"])
    scores = [name for name in found[lost] if name.startswith(("score_", "dice_", "prediction"))]
    assert all(found[lost][name] == "" for name in scores)
    assert found[lost]["tiles"] == "0"
    own, other = found[torn], predictions(expected)[torn]
    assert float(own[scores[-1]] or -1) == pytest.approx(float(other[scores[-1]] or -1), rel=1e-6)
    assert own["tiles"] == other["tiles"] == "4"
    keys = ("status", "validation_tiles", "validation_tiles_unreadable", "slides_without_score")
    assert [summary[key] for key in keys] == ["completed", 10, 6, [lost]]
    told = [(row[0], row[1]) for row in FailedSlides(damaged.folder.failed_slides).rows()]
    assert (told.count((torn, "validate")), told.count((lost, "validate"))) == (1, 5)
    page = render(RunFiles(damaged.folder.path))
    assert "6 of 10" in page
    assert "no tile could be read" in page


def test_replaced_training_tiles_are_counted_and_their_labels_follow(classify_slides, data, tmp_path):
    """Each replaced tile counts once where one rank has the pixels and another the labels."""
    bad = slides_in(data.splits.split, "train")[0]
    dataset, two = broken(data, {bad: None}), {"parallel": "gpipe", "ranks": 2, "device_prefetch": 2}
    config = tile_config(classify_slides, tmp_path / "run", steps=6, **two)
    ran = train_on_threads(config, dataset)
    alone = train_on_threads(tile_config(classify_slides, tmp_path / "alone", steps=6), dataset)
    assert ran.summary["final_loss"] == pytest.approx(alone.summary["final_loss"], rel=1e-5)
    rows = data.rows("train")
    stream = tiles_in_order(config, data, rows).shuffle(config.stream.open_slides)
    drawn = rows[stream.order.epoch(0)[:24]]
    asked = np.count_nonzero(data.tiles.slide[drawn] == data.tiles.slides.index(bad))
    assert 0 < asked < 12
    assert [ran.summary[key] for key in ("status", "images", "tiles_replaced")] == ["completed", 24, asked]
    assert f"{asked} of 24" in render(RunFiles(ran.folder.path))


@pytest.mark.parametrize("parallel", ["single", "ddp", "gpipe"])
def test_a_bag_whose_slide_fails_before_its_last_tile_is_left_out(parallel, classify_slides, data, tmp_path):
    """Once, a tile of the next slide was the last of the bag, and had its label."""
    ranks = {} if parallel == "single" else {"ranks": 2}
    config = tile_config(classify_slides, tmp_path / "run", bag=4, parallel=parallel, **ranks)
    rows = data.rows("train")
    bags = rows[tiles_in_order(config, data, rows).bags(4).order.epoch(0)].reshape(-1, 4)
    assert len(bags) > 1
    last, table = bags[1, -1], data.tiles
    corner, torn = (int(table.l0_x[last]), int(table.l0_y[last])), table.slide_id(last)
    dataset = broken(data, {torn: frozenset({corner})}, SlideError)
    ran = train_on_threads(dataclasses.replace(config, steps=len(bags)), dataset)
    assert [loss == 0 for loss in ran.losses] == [k == 1 for k in range(len(bags))]
    assert [ran.summary[key] for key in ("status", "tiles_replaced")] == ["completed", 1]
    assert (torn, "read") in [tuple(row[:2]) for row in FailedSlides(ran.folder.failed_slides).rows()]


def test_a_tile_that_is_damaged_in_one_box_is_found_when_it_is_read(classify_slides, data, tmp_path):
    """Before any of its boxes is computed: the whole tile is replaced, as without boxes."""
    torn = slides_in(data.splits.split, "train")[0]
    (spec,) = (spec for spec in data.specs if spec.slide_id == torn)
    row = np.flatnonzero(data.tiles.slide == data.tiles.slides.index(torn))[0]
    page = read_tiff(spec.path).pages[0]
    side = page.number(Tag.TILE_WIDTH, 0)
    number = data.tiles.l0_y[row] // side * page.grid[0] + data.tiles.l0_x[row] // side
    offset, count = tile_extent(spec.path, int(number))
    damaged = dataclasses.replace(spec, path=with_bytes(spec.path, tmp_path / spec.path.name, offset, bytes(count)))
    dataset = dataclasses.replace(data, specs=tuple(damaged if s is spec else s for s in data.specs))
    runs = []
    for name, strategy in (("plain", {}), ("boxes", {"stream": "64", "offload_host": "64KiB"})):
        ran = train_on_threads(tile_config(classify_slides, tmp_path / name, steps=8, **strategy), dataset)
        runs.append((ran.summary, sorted(line[:2] for line in FailedSlides(ran.folder.failed_slides).rows())))
    (plain, lost), (boxes, lost_too) = runs
    assert 0 < boxes["tiles_replaced"] == plain["tiles_replaced"] < 16
    assert lost == lost_too
    assert {slide for slide, _ in lost} == {torn}
    assert boxes["final_loss"] == pytest.approx(plain["final_loss"], rel=1e-4)
    assert boxes["file_bytes"][0] > 4 * 128 * 128 * 3, "tiles lie in a file, too"
    assert not list((tmp_path / "boxes").glob("maps*"))


@pytest.mark.parametrize(("steps", "strategy"), [(100_000, {"parallel": "ddp", "ranks": 2}), (3, {})])
def test_a_run_of_replaced_tiles_fails_early_or_at_its_end(
    steps, strategy, classify_slides, data, tmp_path, monkeypatch
):
    monkeypatch.setattr(loop_module, "JUDGED_FROM", 20)
    config = tile_config(classify_slides, tmp_path / "run", steps=steps, **strategy)
    folder = RunFolder(config.out)
    with pytest.raises(RunError, match="more than half of the tiles"):
        train_on_threads(config, broken(data, dict.fromkeys(slides_in(data.splits.split, "train")[1:])))
    summary = json.loads(folder.summary.read_text())
    assert (summary["status"], summary["images"]) == ("failed", 20 if strategy else 12)
    assert summary["tiles_replaced"] > summary["images"] / 2
    if steps == 3:  # its last step is kept, and a further --resume looks at it, too
        state = load_checkpoint(folder.last)
        resumed = Outcome(Throughput(4), IdleTime(1), images=state["images"], replaced=state["replaced"])
        with pytest.raises(RunError, match="more than half of the tiles"):
            resumed.check_replaced(folder.failed_slides)


def test_with_no_readable_validation_tile_there_is_no_score(classify_slides, data, tmp_path):
    config = tile_config(classify_slides, tmp_path / "run", parallel="ddp", ranks=2)
    summary = train_on_threads(config, broken(data, dict.fromkeys(slides_in(data.splits.split, "val")))).summary
    assert (summary["status"], set(summary["metrics"].values()), summary["best"]) == ("completed", {None}, None)
    assert summary["validation_tiles_unreadable"] == summary["validation_tiles"]


def test_a_mask_of_another_slide_costs_its_slide_only(segment_slides, tmp_path):
    """Tiles may get their class from it; then it once ended the command."""
    slides, out = tmp_path / "slides", tmp_path / "run"
    shutil.copytree(segment_slides, slides)
    mask = sorted((slides / "annotations").glob("*.tif"))[0]
    tifffile.imwrite(mask, np.ones((64, 512), np.uint8))
    dataset = prepared(tile_config(slides, out, task="classify"))
    assert len(dataset.specs) == len(dataset.tiles.slides) == 3
    assert len(dataset.tile_labels) == len(dataset.tiles)
    (row,) = FailedSlides(out / "failed_slides.csv").rows()
    assert row[:2] == (mask.name.split(".")[0], "annotation")
    assert "must have the proportions of its slide" in row[2]
