"""Losses of pixels as sums over boxes, beside the plain step: the same loss, gradients and scores, and no map of the
tile's size on the device."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

from app.training.validation import _PixelScore
from benchmarks.whole_engine import whole_engine
from models.losses import IGNORE, PixelClassLoss
from models.registry import build_model
from models.unet import UNet
from parallel.comm.communicator import Communicator
from parallel.comm.local import LocalCommunicator
from parallel.comm.thread_comm import run_on_threads
from parallel.engine.engine import Engine
from parallel.engine.step import Microbatch
from parallel.memory.policy import ActivationPolicy
from parallel.offload.live_bytes import LiveBytes
from parallel.space.grid import Span
from tests.helpers.engine_runs import SGD
from tests.helpers.ranks import run_on_ranks

WEIGHTS = torch.tensor([0.5, 2.0, 1.0])


def unet(norm: Literal["batch", "frozen"] = "frozen") -> nn.Module:
    torch.manual_seed(0)
    return UNet(classes=3, norm=norm, base=4, depth=2).train()


def tiles(dtype: torch.dtype, n: int = 3, shape: tuple[int, int] = (48, 64)) -> tuple[Tensor, Tensor]:
    """Images, and classes of which one tile counts only a strip, so that some boxes have no px that counts."""
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(n, 3, *shape, generator=generator, dtype=torch.float64).to(dtype)
    classes = torch.randint(0, 3, (n, *shape), generator=generator, dtype=torch.uint8)
    classes[0, :, :-9] = IGNORE
    classes[1:, 5:9] = IGNORE
    return images, classes


class Cut:
    """Targets that are made box by box; counts the px that are asked for at a time."""

    def __init__(self, whole: Tensor) -> None:
        self.whole, self.shape, self.most = whole, tuple(whole.shape), 0

    def box(self, rows: Span, columns: Span) -> Tensor:
        self.most = max(self.most, rows.size * columns.size)
        return self.whole[:, rows.start : rows.stop, columns.start : columns.stop]


def engine_of(
    module: nn.Module, loss: nn.Module, communicator: Communicator, m: int, box: int | None, shape: tuple[int, ...]
) -> Engine:
    policy = ActivationPolicy(stream=box)
    return whole_engine(module, loss, SGD, communicator, batch=3, m=m, shape=shape, policy=policy)


def step(
    module: nn.Module, loss: nn.Module, images: Tensor, classes: Any, m: int = 1, box: int | None = None
) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of a step of the engine on one rank, in boxes of ``box`` px."""
    engine = engine_of(module, loss, LocalCommunicator(), m, box, tuple(images.shape))
    parts = ((images, classes),) if m == 1 else zip(images.split((2, 1)), classes.split((2, 1)), strict=True)
    result = engine.step([Microbatch(x, y, tuple(x.shape)) for x, y in parts], 0, 0.1)
    return result.loss, {name: gradient.clone() for name, gradient in engine.gradients().items()}


def error(expected: tuple[float, dict[str, Tensor]], found: tuple[float, dict[str, Tensor]]) -> float:
    assert expected[1].keys() == found[1].keys()
    largest = max(float(g.abs().max()) for g in expected[1].values())
    return max(
        abs(expected[0] - found[0]) / abs(expected[0]),
        *(
            float((g - found[1][name]).abs().max()) / max(float(g.abs().max()), 1e-3 * largest)
            for name, g in expected[1].items()
        ),
    )


@pytest.mark.parametrize(
    ("dtype", "tolerance", "weights"),
    [(torch.float64, 1e-10, WEIGHTS), (torch.float64, 1e-10, None), (torch.float32, 1e-5, WEIGHTS)],
    ids=["float64 weighted", "float64", "float32 weighted"],
)
def test_a_loss_of_pixels_is_exact_at_three_box_sizes(
    dtype: torch.dtype, tolerance: float, weights: Tensor | None
) -> None:
    plain, loss = unet().to(dtype), PixelClassLoss(weights)
    images, classes = tiles(dtype)
    expected = step(copy.deepcopy(plain), loss, images, classes, m=2)
    for box in (40, 24, 17):
        assert error(expected, step(copy.deepcopy(plain), loss, images, classes, m=2, box=box)) <= tolerance


@pytest.mark.long
@pytest.mark.parametrize("name", ["torchvision:lraspp_mobilenet_v3_large", "unet(2,4)"])
def test_other_models_are_exact(name: str) -> None:
    """With gates, resampled outputs, and skips of another make."""
    torch.manual_seed(0)
    plain = build_model(name, classes=3, norm="frozen").double().train()
    for part in plain.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
    images, classes = tiles(torch.float64, shape=(64, 64))
    expected = step(copy.deepcopy(plain), PixelClassLoss(), images, classes)
    assert error(expected, step(copy.deepcopy(plain), PixelClassLoss(), images, classes, box=40)) <= 1e-10


def test_targets_may_be_made_box_by_box() -> None:
    plain = unet(norm="batch").double()
    images, classes = tiles(torch.float64)
    expected = step(copy.deepcopy(plain), PixelClassLoss(), images, classes)
    cut = Cut(classes)
    assert error(expected, step(copy.deepcopy(plain), PixelClassLoss(), images, cut, box=32)) <= 1e-10
    assert 0 < cut.most < classes[0].numel()


class _Halves(nn.Module):
    """Gives other than one map of the tile's size."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.conv, self.what = nn.Conv2d(3, 3, 3, padding=1), what

    def forward(self, x: Tensor) -> Any:
        y = self.conv(x)
        return {"half": y[:, :, ::2], "two": (y, y[:, :2]), "dict": {"out": y}, "dropped": self.training and y}[
            self.what
        ]


@pytest.mark.parametrize(("what", "gives"), [("half", r"\(3, 3, 24, 64\)"), ("two", "tuple"), ("dict", "dict")])
def test_outputs_of_other_forms_are_refused_as_without_boxes(what: str, gives: str) -> None:
    images, classes = tiles(torch.float32)
    for box in (None, 32):
        with pytest.raises(ValueError, match=f"this one gives {gives}: choose a segmentation --model"):
            step(_Halves(what), PixelClassLoss(), images, classes, box=box)


def test_what_is_no_region_up_to_the_output_is_summed_whole() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.Flatten(2), nn.Unflatten(2, (48, 64)), nn.Conv2d(4, 3, 1))
    plain.double()
    images, classes = tiles(torch.float64)
    expected = step(copy.deepcopy(plain), PixelClassLoss(), images, classes)
    assert error(expected, step(plain, PixelClassLoss(), images, Cut(classes), box=32)) <= 1e-12


def test_scores_are_those_of_the_whole_map() -> None:
    plain = unet(norm="batch").double()
    images, classes = tiles(torch.float64)
    score, microbatch = _PixelScore(PixelClassLoss(WEIGHTS), 3), Microbatch(images, classes, tuple(images.shape))
    whole, boxed = (
        engine_of(copy.deepcopy(plain), score.loss, LocalCommunicator(), 1, box, microbatch.shape) for box in (None, 40)
    )
    expected, found = (engine.predict(microbatch, score.sums) for engine in (whole, boxed))
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)  # whole outputs are rounded to float32
    assert torch.equal(found[:, -6:], expected[:, -6:])  # px are counted
    output = whole.predict(microbatch)
    losses = [float(score.loss(output[k : k + 1], classes[k : k + 1])) for k in range(3)]
    torch.testing.assert_close(score.losses(found, 48 * 64).tolist(), losses, rtol=1e-6, atol=0)


@pytest.mark.parametrize("training", [True, False])
def test_memory_is_that_of_boxes(training: bool) -> None:
    """Twice the tile's side takes as much: neither logits nor their gradients lie on the device whole."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 1))
    loss, peaks = PixelClassLoss(), []
    for side in (192, 384):
        images, classes = torch.randn(1, 3, side, side), torch.zeros(1, side, side, dtype=torch.uint8)
        policy, shape = ActivationPolicy(stream=64), tuple(images.shape)
        engine = whole_engine(net, loss, SGD, LocalCommunicator(), batch=1, m=1, shape=shape, policy=policy)
        with LiveBytes() as live:
            microbatch = Microbatch(images, classes, tuple(images.shape))
            if training:
                engine.step([microbatch], 0, 0.1)
            else:
                engine.predict(microbatch, loss.sums)
        peaks.append(live.peak_bytes)
    assert peaks[1] < 1.03 * peaks[0]


def rank_step(communicator: Communicator, state: dict[str, Tensor]) -> tuple[float, dict[str, Tensor]]:
    images, classes = tiles(torch.float64)
    module = unet().double()
    module.load_state_dict(state)
    engine = engine_of(module, PixelClassLoss(WEIGHTS), communicator, 2, 40, (2, 3, 48, 64))
    parts = [(images[:2], classes[:2]), (images[2:], classes[2:])]
    result = engine.step([Microbatch(x, y, tuple(x.shape)) for x, y in (parts[i] for i in engine.share)], 0, 0.1)
    return result.loss, {name: gradient.clone() for name, gradient in engine.gradients().items()}


@pytest.mark.process
def test_two_ranks_of_torch_average_their_gradients(tmp_path: Path) -> None:
    _test_ranks(run_on_ranks(2, f"{__name__}:rank_step", tmp_path, unet().double().state_dict()))


def test_two_ranks_average_their_gradients() -> None:
    _test_ranks(run_on_threads(2, rank_step, unet().double().state_dict()))


def _test_ranks(results: list[tuple[float, dict[str, Tensor]]]) -> None:
    expected = step(unet().double(), PixelClassLoss(WEIGHTS), *tiles(torch.float64), m=2)
    assert all(error(expected, found) <= 1e-10 for found in results)
