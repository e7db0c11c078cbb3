"""A validation on a GPU waits for a microbatch once the next one is begun, and gives the numbers of a CPU."""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from app.settings.run import ScoreSettings
from app.training import validation
from app.training.validation import Outputs, evaluate
from models.losses import IGNORE, PixelClassLoss, TileClassLoss
from parallel.comm.local import LocalCommunicator
from parallel.engine.step import Microbatch
from tests.helpers.sim_gpu import simulated

COUNT, SIZE, CLASSES = 4, 2, 3


class Engine:
    """Only ``predict``; notes its calls."""

    def __init__(self, device: torch.device, pixels: bool, notes: list[str]) -> None:
        torch.manual_seed(0)
        layers = [nn.Conv2d(3, CLASSES, 3, padding=1)] + ([] if pixels else [nn.AdaptiveAvgPool2d(1), nn.Flatten()])
        self.net, self.notes = nn.Sequential(*layers).to(device), notes

    def predicting(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    @torch.no_grad()
    def predict(self, microbatch: Microbatch, sums: Any) -> Tensor:
        self.notes.append("begun")
        output: Tensor = self.net(microbatch.images)
        return output if sums is None else sums(output, microbatch.targets)


def scores(device: torch.device, pixels: bool, notes: list[str]) -> Any:
    """Losses and sums of a validation of which one tile cannot be read."""
    rows, readable = np.arange(COUNT * SIZE), np.ones(COUNT * SIZE, bool)
    readable[3] = False
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(COUNT * SIZE, 3, 6, 6, generator=generator).to(device)
    targets = torch.randint(CLASSES, (COUNT * SIZE, 6, 6) if pixels else (COUNT * SIZE,), generator=generator)
    targets = targets.to(torch.uint8 if pixels else torch.int64).to(device)

    @contextlib.contextmanager
    def microbatches() -> Iterator[Iterator[Outputs]]:
        cuts = [slice(first, first + SIZE) for first in range(0, COUNT * SIZE, SIZE)]
        parts = [(Microbatch(images[cut], targets[cut], (SIZE, 3, 6, 6)), rows[cut], readable[cut]) for cut in cuts]
        yield (Outputs(*part) for part in parts)

    tiles = types.SimpleNamespace(slide=np.zeros(COUNT * SIZE, np.int64))
    dataset: Any = types.SimpleNamespace(
        classes=list(range(CLASSES)), task="segment" if pixels else "classify", tiles=tiles
    )
    engine: Any = Engine(device, pixels, notes)
    loss = PixelClassLoss() if pixels else TileClassLoss(None)
    return evaluate(engine, loss, dataset, rows, microbatches, LocalCommunicator(), ScoreSettings())


def test_ignored_px_are_in_no_dice() -> None:
    logits = torch.tensor([0.0, 1.0]).reshape(1, 2, 1, 1).expand(1, 2, 2, 4)  # class 1 everywhere
    targets = torch.tensor([[[1, 1, 0, IGNORE], [1, 0, IGNORE, IGNORE]]], dtype=torch.uint8)
    part = Outputs(Microbatch(None, targets, (1, 3, 2, 4)), np.arange(1), np.ones(1, bool))
    engine: Any = types.SimpleNamespace(
        predicting=contextlib.nullcontext, predict=lambda microbatch, sums: sums(logits, microbatch.targets)
    )
    dataset: Any = types.SimpleNamespace(
        classes=("background", "gland"),
        task="segment",
        tiles=types.SimpleNamespace(slide=np.zeros(1, np.int64), slides=["s"]),
        splits=types.SimpleNamespace(split={"s": "val"}),
    )
    rows, ranks = np.arange(1), LocalCommunicator()
    opened = functools.partial(contextlib.nullcontext, iter([part]))
    metrics = evaluate(engine, PixelClassLoss(), dataset, rows, opened, ranks, ScoreSettings()).metrics
    assert (metrics["dice_background"], metrics["dice_gland"]) == (0, 2 * 3 / (3 + 5))


@pytest.mark.parametrize("pixels", [False, True], ids=["tiles", "pixels"])
def test_a_microbatch_is_waited_for_when_the_next_is_begun(pixels: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validation, "_tiles", lambda *given: given[-3:-1])
    monkeypatch.setattr(validation, "_segmentation", lambda *given: given[-2:])
    expected_sums, expected_loss = scores(torch.device("cpu"), pixels, [])
    notes: list[str] = []
    with simulated(1, late=0) as gpus:
        event = torch.cuda.Event.synchronize
        monkeypatch.setattr(torch.cuda.Event, "synchronize", lambda self: (notes.append("waited"), event(self)))
        sums, loss = scores(torch.device("cuda", 0), pixels, notes)
        assert not gpus.found
        assert not [place for place in gpus.process.hazards.syncs if "copy to the host" in place]
    waited = ["waited"] * (1 if pixels else 2)
    assert notes == ["begun", *(["begun", *waited] * (COUNT - 1)), *waited]
    assert np.allclose(sums, expected_sums)
    assert loss == pytest.approx(expected_loss)
