"""Where cuDNN times its algorithms: fixed tiles, the whole model on each GPU, and memory to spare."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from app.prediction.computation import Placement
from app.prediction.trained_model import load_model
from app.settings.cli import RunError
from app.training.engines import choose_algorithms
from parallel.comm.thread_comm import run_on_threads
from parallel.space.team import Grid
from parallel.strategy import Strategy
from tests.app.conftest import QUICK, Train
from tests.helpers.hand_made_checkpoint import CLASSIFIER, write_checkpoint

DDP = Strategy("ddp", 2, 1, 2)


@pytest.fixture
def default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)


@pytest.mark.usefixtures("default")
@pytest.mark.parametrize(
    ("strategy", "more", "expected"),
    [
        (Strategy("single", 1, 1, 1), {}, True),
        (DDP, {}, True),
        (Strategy("fsdp", 2, 1, 2), {}, True),
        (DDP, {"fixed": False}, False),
        (DDP, {"limited": True}, False),
        (DDP, {"device": "cpu"}, False),
        (DDP.under(recompute="block"), {}, False),
        (DDP.under(offload="overlap"), {}, False),
        (DDP.under(parameters=True), {}, False),
        (DDP.under(stream=512), {}, False),
        (Strategy("1f1b", 2, 2, 2), {}, False),
        (Strategy("spatial", 2, 1, 2, grid=Grid(2, 1)), {}, False),
        (Placement().strategy(), {}, True),
        (Placement(stream=512).strategy(), {}, False),
    ],
)
def test_where_algorithms_are_timed(strategy: Strategy, more: dict[str, Any], expected: bool) -> None:
    given = {"fixed": True, "limited": False, "device": "cuda"} | more
    choose_algorithms(strategy, torch.device(given.pop("device")), **given)
    assert torch.backends.cudnn.benchmark == expected


@pytest.mark.usefixtures("default")
def test_not_where_the_user_asks_for_deterministic_algorithms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    choose_algorithms(DDP, torch.device("cuda"), fixed=True)
    assert not torch.backends.cudnn.benchmark


def test_not_in_prediction_over_stages() -> None:
    def of_rank(communicator: Any, _: Any) -> Strategy:
        return Placement(communicator).strategy()

    assert all(strategy.splits for strategy in run_on_threads(2, of_rank))


def test_a_run_chooses_by_its_tiles_and_its_memory(
    classify_slides: Path, train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def choose(strategy: Strategy, device: torch.device, *, fixed: bool, limited: bool) -> None:
        raise RunError(f"{strategy.name} {fixed=} {limited=}")

    monkeypatch.setattr("app.training.session.choose_algorithms", choose)
    done = train("--slides", classify_slides, *QUICK, "--steps", "1", "--memory", "4GiB", "--out", tmp_path / "run")
    assert "single fixed=True limited=True" in done.stderr


@pytest.mark.parametrize("tile", [64, "slide"])
def test_a_prediction_chooses_by_its_tiles(
    tile: int | Literal["slide"], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen: list[bool] = []
    monkeypatch.setattr(
        "app.prediction.trained_model.choose_algorithms", lambda strategy, device, fixed: chosen.append(fixed)
    )
    path = write_checkpoint(tmp_path / "last.pt", CLASSIFIER, tile=tile, mpp=0.5)
    load_model(path, CLASSIFIER, torch.device("cpu"))
    assert chosen == [tile == 64]
