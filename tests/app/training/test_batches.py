"""Who reads what: pixels and targets on different ranks, of the same tiles, and files that one rank cannot read."""

import contextlib
import dataclasses
import importlib
import io
import os
import pathlib
import pickle
import re
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from app.settings.optimization import OptimizerSettings
from app.settings.run import DataSettings, RunConfig
from app.training import share as share_module
from app.training.batches import RankReading, microbatches_of, sizes_of_part
from app.training.dataset import prepare
from app.training.model import build_loss
from app.training.run_folder import RunFolder
from app.training.share import share, take
from app.training.steps import TrainLoader
from parallel.comm.thread_comm import LocalCommunicator, run_on_threads
from parallel.engine.step import NeededInputs
from parallel.schedule.shares import split_batch
from pipelines.catalog.handles import SlidePool
from pipelines.labels.annotations import SlideAnnotations
from pipelines.slides.geometry import TileBox
from pipelines.slides.slide import SlideError
from pipelines.stream.augment import AugmentSettings
from pipelines.stream.device import DevicePrefetcher
from pipelines.stream.device_pixels import PixelMaker
from pipelines.stream.stream import TileStream
from pipelines.tiles.tiling import IndexSettings
from tests.app.conftest import CLASSIFIER, QUICK, SEGMENTER, losses_of, summary_of
from tests.helpers.forked import run_ranks
from tests.helpers.tiles import TILE, memory_specs, tile_table

NOTHING, BOTH = NeededInputs(False, False), NeededInputs(True, True)
IMAGES, TARGETS = NeededInputs(True, False), NeededInputs(False, True)
TABLE = tile_table([5, 6])


class Recorded(LocalCommunicator):
    """One rank that is told what the others say: ``sums`` are added to what it gives, in turn."""

    def __init__(self, sums=()):
        self.sums = list(sums)

    def all_reduce(self, tensor):
        if self.sums:
            tensor += self.sums.pop(0)


def recorded(*sums):
    return Recorded([torch.tensor(values) for values in sums])


def stream_of(*, damaged=False):
    specs = memory_specs(TABLE, lambda spec: replace(spec, bad=frozenset({2} if damaged and not spec.number else ())))
    return TileStream.over(TABLE, epochs=1).read(SlidePool(specs, 2)).label(np.arange(11))


def feed_of(tiles):
    return DevicePrefetcher(tiles, tiles.ready, PixelMaker(torch.device("cpu"), AugmentSettings(), 0))


def test_a_rank_reads_the_microbatches_it_wants():
    ranges = split_batch(5, 3)
    reading = RankReading(recorded(), 5, ranges, [IMAGES, NOTHING, BOTH])
    assert not reading.apart
    assert reading.sizes == (2, 2, 1)
    stream = reading.sharded(stream_of())
    assert (stream.rows, stream.image_rows, stream.target_rows) == ((0, 1, 2, 3, 4), (0, 1, 4), (4,))
    with iter(stream) as tiles:
        parts = list(microbatches_of(feed_of(tiles), next(tiles), (2, 2, 1)))
    given = [NeededInputs(part.images is not None, part.targets is not None) for part in parts]
    assert given == [IMAGES, NOTHING, BOTH]
    assert [part.shape for part in parts] == [(size, 3, TILE, TILE) for size in (2, 2, 1)]
    group = RankReading(recorded(), 7, split_batch(7, 4)[2:], [BOTH, BOTH]).sharded(stream_of())
    assert group.rows == (4, 5, 6), "its own part of the batch"


@pytest.mark.parametrize(("group", "ranges"), [(0, [range(2)]), (1, [range(2, 4), range(4, 6)])])
def test_new_shares_are_those_of_validation_too(group, ranges):
    """A slow rank had half of the validation tiles, however few it had of training."""
    engine = SimpleNamespace(share=(0, 1), wants=lambda i: BOTH, predict_wants=BOTH)
    engine.reshare = lambda shares: setattr(engine, "share", shares[group])
    tiles = split_batch(6, 3)
    reading = RankReading(recorded(), 6, tiles[:2], [BOTH] * 2)
    session = SimpleNamespace(
        engine=engine,
        ranges=tiles,
        reading=reading,
        validation_reading=reading,
        stream=reading.sharded(stream_of()),
        feed=lambda batches, *_: feed_of(batches),
    )
    with contextlib.closing(TrainLoader(session, contextlib.nullcontext, None)) as loader:
        loader.reshare(((0,), (1, 2)), 0)
    assert session.validation_reading.ranges == ranges
    assert len(session.validation_reading.wants) == len(ranges)


def test_labels_follow_the_tile_that_was_read_on_the_rank_with_the_pixels():
    def rank(communicator, _):
        wants = [[IMAGES] * 2, [TARGETS] * 2][communicator.rank]
        reading = RankReading(communicator, 4, split_batch(4, 2), wants)
        assert reading.apart
        with iter(reading.sharded(stream_of(damaged=communicator.rank == 0))) as batches:
            batch = next(batches)
            changed = reading.settle(batches, batch)
            return changed, batch.rows.tolist(), batch.targets.tolist()

    read = [0, 1, 3, 3]
    assert run_on_threads(2, rank) == [(False, read, []), (True, read, read)]


def test_members_of_a_team_go_on_with_the_same_tiles_where_one_part_is_damaged():
    def rank(communicator, _):
        rows = (0, TILE // 2) if communicator.rank == 0 else (TILE // 2, TILE)
        box = TileBox(*rows, 0, TILE)
        reading = RankReading(communicator, 4, split_batch(4, 2), [BOTH] * 2, part=(box, box))
        assert reading.apart
        with iter(reading.sharded(stream_of(damaged=communicator.rank == 1))) as batches:
            batch = next(batches)
            changed = reading.settle(batches, batch)
            return changed, batch.rows.tolist(), batch.sides(0)

    (first, *read), (second, *same) = run_on_threads(2, rank)
    assert (first, second) == (True, False)
    assert read == same == [[0, 1, 3, 3], (TILE, TILE)]


@pytest.mark.parametrize("damaged", [False, True])
def test_ranks_settle_a_batch_only_if_a_tile_of_it_is_replaced_or_it_was_not_read_in_time(damaged, monkeypatch):
    gate, lease = threading.Event(), SlidePool.lease
    monkeypatch.setattr(SlidePool, "lease", lambda pool, slide_id: gate.wait(20) and lease(pool, slide_id))
    reading = RankReading(recorded([1]), 4, split_batch(4, 2), [IMAGES] * 2)
    with iter(reading.sharded(stream_of(damaged=damaged))) as tiles, feed_of(tiles) as feed:
        assert reading.needs_sync(feed)
        gate.set()
        while not tiles.ready():
            time.sleep(0.001)
        assert reading.needs_sync(feed) == damaged


def test_where_pixels_and_targets_are_read_together_on_all_ranks_nothing_is_settled():
    reading = RankReading(recorded(), 4, split_batch(4, 2), [BOTH] * 2)
    with iter(reading.sharded(stream_of(damaged=True))) as tiles, feed_of(tiles) as feed:
        assert not reading.needs_sync(feed)
        assert not reading.settle(tiles, next(feed))
    for others in (1, 0):
        assert RankReading(recorded([others]), 4, split_batch(4, 2), [NOTHING] * 2).apart == bool(others)


def test_a_short_batch_is_cut_into_microbatches_of_the_usual_size():
    with iter(stream_of().batch(4)) as batches:
        assert [sizes_of_part(batch, 3) for batch in batches] == [[3, 1], [3, 1], [3]]
    with iter(stream_of().batch(4).shard(range(3, 4))) as batches:
        assert [sizes_of_part(batch, 3) for batch in batches] == [[1], [1], []]


def test_a_member_that_has_some_samples_of_a_microbatch_reads_these_alone():
    wants = (NeededInputs(True, True),) * 2
    ranges = (range(4), range(4, 7))
    reading = RankReading(LocalCommunicator(), 7, ranges, wants, samples=lambda count: range(count // 2, count))
    assert reading.read_ranges == (range(2, 4), range(5, 7))
    assert (reading.sizes, reading.counts) == ((2, 2), (4, 3))


def train_with_a_blind_rank(pattern, *words):
    """``app.train``, where rank 1 can neither see nor open files that ``pattern`` is found in."""
    if os.environ["RANK"] == "1":
        exists = Path.exists

        def refuse(event, arguments):
            if event == "open" and re.search(pattern, str(arguments[0])):
                raise PermissionError(13, "Permission denied", str(arguments[0]))

        Path.exists = lambda self: not re.search(pattern, str(self)) and exists(self)
        sys.addaudithook(refuse)
    return importlib.import_module("app.train").main(list(words))


TABLES = r"labels\.csv|tiles\.parquet|stains\.json|splits\.csv|plan\.json|config\.yaml|attempts\.json|summary\.json"


@pytest.mark.process
def test_tables_that_one_rank_cannot_read(classify_slides, train, tmp_path):
    """Labels, index, stain fits, split, plan, settings of the run and its end: all as on one rank that sees them."""
    common = ("--slides", str(classify_slides), *QUICK, "--stain", "macenko", "--optimizer", "sgd")
    common += ("--class-weights", "balanced")
    longer = ("--steps", "3", "--resume", "--extend")
    for number, more in enumerate((("--steps", "2"), longer, longer)):
        if number < 2:
            train(*common, *more, "--out", tmp_path / "seeing")
        (folder := tmp_path / str(number)).mkdir()
        words = (TABLES, *common, *more, "--out", str(tmp_path / "blind"))
        codes, printed = run_ranks(2, f"{__name__}:train_with_a_blind_rank", words, folder)
        assert codes == [0, 0], printed
    assert "nothing to do" in printed
    assert losses_of(tmp_path / "blind") == pytest.approx(losses_of(tmp_path / "seeing"), rel=1e-4)


@pytest.mark.process
@pytest.mark.parametrize("task", ["segment", "classify"])
def test_an_annotation_that_one_rank_cannot_read(task, segment_slides, tmp_path):
    """It costs that rank the tiles of one slide, and no rank another list of slides, classes or weights."""
    words = ("--slides", str(segment_slides), *QUICK, "--out", str(tmp_path / "run"), "--task", task, "--tile", "128")
    words += ("--model", SEGMENTER if task == "segment" else CLASSIFIER, "--class-weights", "balanced")
    words += ("--steps", "2", "--parallel", "ddp")
    pattern = r"slide_0001\D*mask|mask.*slide_0001"
    codes, printed = run_ranks(2, f"{__name__}:train_with_a_blind_rank", [pattern, *words], tmp_path)
    assert codes == [0, 0], printed
    assert summary_of(tmp_path / "run")["images"] == 8


@pytest.fixture(scope="module")
def drawn(segment_slides, tmp_path_factory):
    folder = RunFolder(tmp_path_factory.mktemp("drawn"))
    return prepare(RunConfig(DataSettings(segment_slides), IndexSettings(tile=128)), folder, lambda line: None)


BALANCED = OptimizerSettings(class_weights="balanced")


def test_class_weights_are_those_that_the_first_rank_counts_of_tiles_that_can_be_read(drawn):
    read, rows = SlideAnnotations.read_mask, np.arange(len(drawn.tiles))

    def weights(communicator, given):
        blind, slides = given

        def read_mask(truth, slide_id, *more):
            if communicator.rank == blind and slide_id in slides:
                raise SlideError("Input/output error")
            read(truth, slide_id, *more)

        bound = type("Blind", (SlideAnnotations,), {"read_mask": read_mask, "__slots__": ()})
        fields = {field.name: getattr(drawn.truth, field.name) for field in dataclasses.fields(drawn.truth)}
        blinded = dataclasses.replace(drawn, truth=bound(**fields))
        return build_loss(BALANCED, blinded, rows, communicator).class_weights.tolist()

    one = drawn.tiles.slides[:1]
    first, second = run_on_threads(2, weights, (1, one))
    assert first == second == run_on_threads(2, weights, (None, one))[0]
    assert first != run_on_threads(2, weights, (0, one))[0]
    with pytest.raises(ValueError, match="cannot be read"):
        run_on_threads(1, weights, (0, drawn.tiles.slides))


def test_the_first_rank_takes_what_the_start_has_prepared_once(drawn, tmp_path):
    path = tmp_path / "prepared"
    path.write_bytes(pickle.dumps(drawn, 5))
    taken = take(path)
    assert (taken.specs, taken.splits, taken.truth) == (drawn.specs, drawn.splits, drawn.truth)
    np.testing.assert_array_equal(taken.tiles.l0_x, drawn.tiles.l0_x)
    assert take(path) is None, "a restart prepares anew"
    path.write_bytes(pickle.dumps(print))
    with pytest.raises(pickle.UnpicklingError, match="print is not among"):
        take(path)


def test_what_the_first_rank_finds_is_everybody_s_and_only_classes_of_the_project_are_read(drawn):
    assert run_on_threads(3, lambda communicator, _: share(communicator, lambda: communicator.rank)) == [0, 0, 0]
    _, other = run_on_threads(2, lambda communicator, _: share(communicator, lambda: drawn))
    assert (other.tiles.slides, other.truth) == (drawn.tiles.slides, drawn.truth)
    np.testing.assert_array_equal(other.tiles.l0_x, drawn.tiles.l0_x)
    for value in (os.system, eval, np.save):
        with pytest.raises(pickle.UnpicklingError, match="not among"):
            share_module._Unpickler(io.BytesIO(pickle.dumps(value))).load()


def test_the_first_rank_may_take_longer_than_a_message(monkeypatch):
    """It indexed slides for half an hour, after which the others gave it up."""
    monkeypatch.setattr(share_module, "PENDING_S", 0.1)

    def index(communicator, fault):
        time.sleep(1.5)
        if fault:
            raise ValueError(fault)
        return communicator.rank

    for_all = lambda communicator, fault: share(communicator, lambda: index(communicator, fault))  # noqa: E731
    assert run_on_threads(2, for_all, timeout_s=1) == [0, 0]
    with pytest.raises(ValueError, match="no slides"):
        run_on_threads(2, for_all, "no slides", timeout_s=1)


def test_a_path_of_python_3_13_is_read(monkeypatch):
    monkeypatch.setitem(sys.modules, "pathlib._local", pathlib)  # the module that its pickles name
    sent = b"cpathlib._local\nPosixPath\n(Vslides\ntR."
    assert share_module._Unpickler(io.BytesIO(sent)).load() == Path("slides")
