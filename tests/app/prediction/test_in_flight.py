"""While a GPU computes a batch of windows the one before it is given, with the numbers of a CPU."""

import copy
import functools
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from app.prediction import trained_model, whole_slide
from app.prediction.computation import Placement
from app.prediction.trained_model import TrainedModel
from app.prediction.whole_slide import _answers, _tiles, predict_slide
from pipelines.slides.slide import TileReadError
from pipelines.stream.device_pixels import PixelMaker
from pipelines.tiles.stain import StainFit
from tests.helpers.hand_made_checkpoint import CLASSIFIER, write_checkpoint
from tests.helpers.sim_gpu import simulated

SIDE, COUNT, BATCH = 64, 5, 2
FIT = StainFit("macenko", (0.6, 0.7, 0.3, 0.1, 0.9, 0.2, 1.5, 1.0))


class Windows:
    """Windows as ``SlideWindows`` has them; the last cannot be read."""

    stain = FIT

    def __len__(self):
        return COUNT

    def region(self, i):
        return i


class Slide:
    def read(self, region):
        if region == COUNT - 1:
            raise TileReadError("damaged")
        return np.random.default_rng(region).integers(256, size=(SIDE, SIDE, 3), dtype=np.uint8)


def answers(model, target):
    model = copy.copy(model)
    model.stain_target = target
    with ThreadPoolExecutor(2) as pool:
        return [*_answers(_tiles(Slide(), Windows(), pool, BATCH + 2), Windows(), model, BATCH)]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("run") / "best.pt", CLASSIFIER, tile=SIDE, mpp=0.5)


@pytest.mark.parametrize(
    ("spread", "target"),
    [(None, StainFit("macenko", (*FIT.numbers[:6], 1.0, 1.2))), (Placement(parameters=True), None)],
    ids=["whole, stained", "by the engine"],
)
def test_a_batch_is_waited_for_when_the_next_is_asked(path, spread, target, monkeypatch):
    load = functools.partial(TrainedModel, path, CLASSIFIER, placement=spread, batch=BATCH)
    expected = answers(load(torch.device("cpu")), target)
    assert [i for i, _ in expected] == list(range(COUNT))
    assert expected[-1][1] == "damaged"
    notes = []
    begin = TrainedModel.begin

    def noted(*args):
        notes.append("asked")
        wait = begin(*args)
        return lambda: (notes.append("waited"), wait())[1]

    monkeypatch.setattr(TrainedModel, "begin", noted)
    with simulated(1, late=0) as gpus:
        model = load(torch.device("cuda", 0))
        assert (model.computation._engine is None) == (spread is None)
        waits = gpus.process.hazards.syncs
        waits.clear()
        given = answers(model, target)
        assert not gpus.found
    assert notes == ["asked", "asked", "waited", "asked", "waited", "waited"]
    making = sum(count for place, count in waits.items() if "device_pixels" in place)  # a maker of pixels, once
    assert (waits.total() - making, making) in ((3, 0), (3, 4)), waits
    for (i, values), (number, other) in zip(given, expected, strict=True):
        assert i == number
        assert isinstance(values, str) if isinstance(other, str) else np.allclose(values, other, atol=1e-6)


def test_one_maker_of_pixels_is_kept_for_a_slide(path, monkeypatch):
    made = []

    class Counted(PixelMaker):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            made.append(self)

    monkeypatch.setattr(trained_model, "PixelMaker", Counted)
    model = TrainedModel(path, CLASSIFIER, torch.device("cpu"), batch=BATCH)
    before = len(made)
    answers(model, FIT)
    assert len(made) - before == 1


class WatchedSlide(Slide):
    """A slide whose windows after the first batch are read slowly, and that may not be closed meanwhile."""

    def __init__(self):
        self.reading, self.is_read = set(), threading.Event()

    def read(self, region):
        if region >= BATCH:
            self.reading.add(region)
            self.is_read.set()
            time.sleep(0.2)
            self.reading.discard(region)
        return super().read(region)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        assert not self.reading, "closed while it is read"


def test_a_slide_is_closed_after_its_last_read_where_the_model_fails(path, monkeypatch):
    """OpenSlide frees what threads inside a read still use."""
    slide = WatchedSlide()

    def fail(*_):
        assert slide.is_read.wait(10)
        raise torch.OutOfMemoryError("CUDA out of memory")

    model = TrainedModel(path, CLASSIFIER, torch.device("cpu"), batch=BATCH)
    model.computation.writes = False  # no files: the answers alone
    monkeypatch.setattr(TrainedModel, "begin", fail)
    monkeypatch.setattr(whole_slide, "windows_of", lambda spec, settings: Windows())
    spec = SimpleNamespace(slide_id="a", open=lambda: slide)
    with pytest.raises(torch.OutOfMemoryError):
        predict_slide(spec, model, None, BATCH, None)
