"""What ranks have to decide alike, where one of them cannot read a file that the others can."""

from __future__ import annotations

import csv
import dataclasses
import importlib
import io
import os
import pickle
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from app.settings.optimization import OptimizerSettings
from app.settings.run import DataSettings, RunConfig
from app.training import share as share_module
from app.training.dataset import Dataset, prepare
from app.training.model import build_loss
from app.training.run_folder import RunFolder
from app.training.share import share, take
from parallel.comm.communicator import Communicator
from parallel.comm.thread_comm import run_on_threads
from pipelines.labels.annotations import SlideAnnotations
from pipelines.slides.slide import SlideError
from pipelines.tiles.index_settings import IndexSettings
from tests.app.conftest import QUICK, Train, summary_of
from tests.helpers.forked import run_ranks


def train_with_a_blind_rank(pattern: str, *words: str) -> int:
    """``app.train``, where rank 1 can neither see nor open files that ``pattern`` is found in."""
    if os.environ["RANK"] == "1":
        exists = Path.exists

        def refuse(event: str, arguments: tuple[Any, ...]) -> None:
            if event == "open" and re.search(pattern, str(arguments[0])):
                raise PermissionError(13, "Permission denied", str(arguments[0]))

        Path.exists = lambda self: not re.search(pattern, str(self)) and exists(self)  # type: ignore[method-assign]
        sys.addaudithook(refuse)
    code: int = importlib.import_module("app.train").main(list(words))
    return code


def losses(run: Path) -> list[float]:
    with (run / "metrics.csv").open() as file:
        return [float(row["loss"]) for row in csv.DictReader(file)]


TABLES = r"labels\.csv|tiles\.parquet|stains\.json|splits\.csv|plan\.json|config\.yaml|attempts\.json|summary\.json"


@pytest.mark.process
def test_tables_that_one_rank_cannot_read(classify_slides: Path, train: Train, tmp_path: Path) -> None:
    """Labels, index, stain fits, split, plan, settings of the run and its end: all as on one rank that sees them."""
    common = ("--slides", str(classify_slides), *QUICK, "--stain", "macenko", "--optimizer", "sgd")
    common += ("--class-weights", "balanced")
    longer = ("--steps", "3", "--resume", "--extend")
    for number, more in enumerate((("--steps", "2"), longer, longer)):
        if number < 2:
            done = train(*common, *more, "--out", tmp_path / "seeing")
            assert done.returncode == 0, done.stderr
        (folder := tmp_path / str(number)).mkdir()
        words = (TABLES, *common, *more, "--out", str(tmp_path / "blind"))
        codes, printed = run_ranks(2, f"{__name__}:train_with_a_blind_rank", words, folder)
        assert codes == [0, 0], printed
    assert "nothing to do" in printed
    assert losses(tmp_path / "blind") == pytest.approx(losses(tmp_path / "seeing"), rel=1e-4)


@pytest.mark.process
@pytest.mark.parametrize("task", ["segment", "classify"])
def test_an_annotation_that_one_rank_cannot_read(task: str, segment_slides: Path, tmp_path: Path) -> None:
    """It costs that rank the tiles of one slide, and no rank another list of slides, classes or weights."""
    words = ("--slides", str(segment_slides), *QUICK, "--out", str(tmp_path / "run"), "--task", task, "--tile", "128")
    model = "tests.helpers.tiny_models:" + ("segmenter" if task == "segment" else "classifier")
    words += ("--model", model, "--class-weights", "balanced", "--steps", "2", "--parallel", "ddp")
    pattern = r"slide_0001\D*mask|mask.*slide_0001"
    codes, printed = run_ranks(2, f"{__name__}:train_with_a_blind_rank", [pattern, *words], tmp_path)
    assert codes == [0, 0], printed
    assert summary_of(tmp_path / "run")["images"] == 8


@pytest.fixture(scope="module")
def drawn(segment_slides: Path, tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    folder = RunFolder(tmp_path_factory.mktemp("drawn"))
    return prepare(RunConfig(DataSettings(segment_slides), IndexSettings(tile=128)), folder, lambda line: None)


BALANCED = OptimizerSettings(class_weights="balanced")


def test_class_weights_are_those_that_the_first_rank_counts(drawn: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    read, of_slide = SlideAnnotations.read_mask, {drawn.tiles.slides[0]}
    rows = np.arange(len(drawn.tiles))

    def weights(communicator: Communicator, blind: int) -> list[float]:
        def read_mask(truth: SlideAnnotations, slide_id: str, *more: Any) -> None:
            if communicator.rank == blind and slide_id in of_slide:
                raise SlideError("Input/output error")
            read(truth, slide_id, *more)

        truth = drawn.truth
        assert isinstance(truth, SlideAnnotations)
        bound = type("Blind", (SlideAnnotations,), {"read_mask": read_mask, "__slots__": ()})
        fields = {field.name: getattr(truth, field.name) for field in dataclasses.fields(truth)}
        blinded = dataclasses.replace(drawn, truth=bound(**fields))
        loss = build_loss(BALANCED, blinded, rows, communicator)
        assert loss.class_weights is not None
        values: list[float] = loss.class_weights.tolist()
        return values

    first, *others = run_on_threads(2, weights, 1)
    assert all(other == first for other in others)
    assert first == run_on_threads(2, weights, None)[0]
    assert first != run_on_threads(2, weights, 0)[0], "of the tiles that it can read"


def test_the_first_rank_takes_what_the_start_has_prepared_once(drawn: Dataset, tmp_path: Path) -> None:
    path = tmp_path / "prepared"
    path.write_bytes(pickle.dumps(drawn, 5))
    taken = take(path)
    assert (taken.specs, taken.splits, taken.truth) == (drawn.specs, drawn.splits, drawn.truth)
    np.testing.assert_array_equal(taken.tiles.l0_x, drawn.tiles.l0_x)
    assert take(path) is None, "a restart prepares anew"
    path.write_bytes(pickle.dumps(print))
    with pytest.raises(pickle.UnpicklingError, match="print is not among"):
        take(path)


def test_class_weights_need_a_tile_that_can_be_read(drawn: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    def read_mask(*_: Any) -> None:
        raise SlideError("Input/output error")

    monkeypatch.setattr(SlideAnnotations, "read_mask", read_mask)
    with pytest.raises(ValueError, match="cannot be read"):
        run_on_threads(1, lambda communicator, _: build_loss(BALANCED, drawn, np.arange(4), communicator))


def test_what_the_first_rank_finds_is_everybody_s() -> None:
    assert run_on_threads(3, lambda communicator, _: share(communicator, lambda: communicator.rank)) == [0, 0, 0]


def test_only_classes_of_the_project_are_read(drawn: Dataset) -> None:
    found = run_on_threads(2, lambda communicator, _: share(communicator, lambda: drawn))
    assert found[1].tiles.slides == drawn.tiles.slides
    assert torch.equal(torch.from_numpy(found[1].tiles.l0_x), torch.from_numpy(drawn.tiles.l0_x))
    assert found[1].truth == drawn.truth
    for value in (os.system, eval, np.save):
        with pytest.raises(pickle.UnpicklingError, match="not among"):
            share_module._Unpickler(io.BytesIO(pickle.dumps(value))).load()
