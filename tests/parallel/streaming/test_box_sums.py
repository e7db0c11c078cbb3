"""Losses of pixels as sums over boxes are the plain step's; bytes of boxes are those predicted; maps lie in strips."""

from __future__ import annotations

import copy
import functools
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

from app.planning.workload import Workload
from app.training.validation import _PixelScore
from benchmarks.in_boxes import planned_regions, streamed
from benchmarks.whole_engine import whole_engine
from models.losses import IGNORE, PixelClassLoss
from models.registry import build_model
from models.unet import UNet
from parallel.comm.communicator import Communicator
from parallel.comm.thread_comm import LocalCommunicator, run_on_threads
from parallel.engine.engine import Engine
from parallel.engine.step import Microbatch
from parallel.memory.policy import ActivationPolicy
from parallel.offload.copies import Copies
from parallel.offload.host_memory import HostMemory
from parallel.offload.live_bytes import LiveBytes
from parallel.space.boxes import Boxes, _whole_tile_bytes
from parallel.space.cuts import Span
from parallel.space.team import Box
from parallel.streaming import step_record
from parallel.streaming.maps import Maps
from parallel.streaming.step_record import record
from parallel.streaming.strip_maps import StripMaps
from parallel.trace.without_data import preserve_module_state
from tests.helpers.engine_runs import SGD
from tests.helpers.lanes import long_where
from tests.helpers.plain_step import TOLERANCE, relative_errors
from tests.helpers.sim_gpu import simulated
from tests.helpers.small_nets import Made

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
    module: nn.Module,
    loss: nn.Module,
    images: Tensor,
    classes: Any,
    m: int = 1,
    box: int | None = None,
    communicator: Communicator | None = None,
) -> tuple[float, dict[str, Tensor]]:
    engine = engine_of(module, loss, communicator or LocalCommunicator(), m, box, tuple(images.shape))
    parts = [(images, classes)] if m == 1 else [*zip(images.split((2, 1)), classes.split((2, 1)), strict=True)]
    result = engine.step([Microbatch(*parts[i], tuple(parts[i][0].shape)) for i in engine.share], 0, 0.1)
    return result.loss, {name: gradient.clone() for name, gradient in engine.gradients().items()}


def error(expected: tuple[float, dict[str, Tensor]], found: tuple[float, dict[str, Tensor]]) -> float:
    assert expected[1].keys() == found[1].keys()
    return max(abs(expected[0] / found[0] - 1), *relative_errors(expected[1], found[1]).values())


@pytest.mark.parametrize(
    ("dtype", "weights", "boxes"),
    [(torch.float64, WEIGHTS, (17, 24)), (torch.float64, None, (40,)), (torch.float32, WEIGHTS, (24,))],
)
def test_a_loss_of_pixels_is_exact_at_three_box_sizes(dtype: torch.dtype, weights: Any, boxes: tuple[int, ...]) -> None:
    plain, loss = unet().to(dtype), PixelClassLoss(weights)
    images, classes = tiles(dtype)
    expected = step(copy.deepcopy(plain), loss, images, classes, m=2)
    for box in boxes:
        assert error(expected, step(copy.deepcopy(plain), loss, images, classes, m=2, box=box)) <= TOLERANCE[dtype]


@pytest.mark.long
def test_gates_and_resampled_outputs_are_exact() -> None:
    torch.manual_seed(0)
    plain = build_model("torchvision:lraspp_mobilenet_v3_large", classes=3, norm="frozen").double().train()
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


FORMS_OF = {"half": lambda y: y[:, :, ::2], "two": lambda y: (y, y[:, :2]), "dict": lambda y: {"out": y}}
"""Outputs other than one map of the tile's size."""


@pytest.mark.parametrize(("what", "gives"), [("half", r"\(3, 3, 24, 64\)"), ("two", "tuple"), ("dict", "dict")])
def test_outputs_of_other_forms_are_refused_as_without_boxes(what: str, gives: str) -> None:
    images, classes = tiles(torch.float32)
    net = Made(lambda m, x: FORMS_OF[what](m.conv(x)), conv=nn.Conv2d(3, 3, 3, padding=1))
    for box in (None, 32):
        with pytest.raises(ValueError, match=f"this one gives {gives}: choose a segmentation --model"):
            step(net, PixelClassLoss(), images, classes, box=box)


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
        microbatch, policy = Microbatch(images, classes, tuple(images.shape)), ActivationPolicy(stream=64)
        engine = whole_engine(net, loss, SGD, LocalCommunicator(), batch=1, m=1, shape=microbatch.shape, policy=policy)
        with LiveBytes() as live:
            if training:
                engine.step([microbatch], 0, 0.1)
            else:
                engine.predict(microbatch, loss.sums)
        peaks.append(live.peak_bytes)
    assert peaks[1] < 1.03 * peaks[0]


def test_two_ranks_average_their_gradients() -> None:
    plain, loss, given = unet().double(), PixelClassLoss(WEIGHTS), tiles(torch.float64)

    def rank(communicator: Communicator, _: None) -> tuple[float, dict[str, Tensor]]:
        return step(copy.deepcopy(plain), loss, *given, m=2, box=40, communicator=communicator)

    expected = step(copy.deepcopy(plain), loss, *given, m=2)
    assert all(error(expected, found) <= 1e-10 for found in run_on_threads(2, rank))


@functools.cache
def living(name: str, norm: str, tile: int, box: int) -> tuple[Boxes, int]:
    """The plan, and the most bytes that live on the device in a step besides parameters and what follows the region."""
    torch.manual_seed(0)
    model = build_model(name, classes=2, norm=norm)
    for parameter in model.parameters():  # as many as count little
        parameter.requires_grad_(parameter.numel() < 100_000)
    run = streamed(model, box, (1, 3, tile, tile))
    image = torch.rand(1, 3, tile, tile)
    with LiveBytes() as live:
        run(image).square().mean().backward()
    (plan,) = planned_regions(run, tuple(image.shape))
    return plan.run.boxes, live.peak_bytes


FULLEST = [("resnet18", "frozen", 256, 64, 0.1), ("unet_w4", "frozen", 256, 128, 0.1)]
FULLEST += [("resnet18", "batch", 192, 64, 0.15)]  # a box that is the whole map is not copied on a CPU


@pytest.mark.parametrize(("name", "norm", "tile", "box", "within"), long_where(FULLEST, FULLEST[-1]))
def test_the_bytes_of_the_fullest_box_are_foreseen(name: str, norm: str, tile: int, box: int, within: float) -> None:
    boxes, measured = living(name, norm, tile, box)
    leaving = sum(boxes.region.sizes[each] for each in boxes.region.live_out if each in boxes.region.sides)
    assert boxes.device_bytes + 2 * leaving == pytest.approx(measured, rel=within)


def test_boxes_keep_to_the_bytes_they_are_planned_for() -> None:
    """A part that would not is cut, unless it is one step in boxes of the asked side."""
    boxes, _ = living("resnet18", "frozen", 256, 64)
    allowed = _whole_tile_bytes(boxes.region) / 16
    for phase, part in boxes.parts():
        assert part.box == 64 or boxes.part_bytes(phase, part) <= 1.05 * allowed


@pytest.mark.parametrize("name", long_where(["resnet18", "torchvision:efficientnet_b0"], "torchvision:efficientnet_b0"))
def test_records_are_those_of_every_step_run(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    work = Workload(name, 64, 2)
    traced = work._traced
    region = work._region(traced)
    runs = []
    run = step_record._Recording._run
    monkeypatch.setattr(step_record._Recording, "_run", lambda *given: (runs.append(1), run(*given))[1])
    with preserve_module_state(traced.model):
        traced.model.train()
        few, fewer = record(traced.model, region), len(runs)
        monkeypatch.setattr(step_record._Recording, "_key", lambda self, step: None)
        each = record(traced.model, region)
    assert few == each
    assert fewer < (len(runs) - fewer) * 0.75


SHAPE, NAME = (2, 3, 12, 16), "map"
FORMS = {NAME: SHAPE}, {NAME: (2, 3)}
CELLS = [(Span(r, r + 4), Span(c, c + 8)) for r in (0, 4, 8) for c in (0, 8)]
RIMS: list[Box] = [
    (Span(max(0, r.start - 1), min(12, r.stop + 1)), Span(max(0, c.start - 1), min(16, c.stop + 1))) for r, c in CELLS
]
CUTS = {NAME: {0, 7, 8, 9, 16}}
UNEVEN: list[Box] = [(Span(6, 9), Span(3, 12)), (Span(0, 2), Span(5, 6)), (Span(11, 12), Span(0, 16))]


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("late", [None, 0])
def test_boxes_are_those_of_plain_maps(layout: torch.memory_format, late: int | None) -> None:
    cpu, generator = torch.device("cpu"), torch.Generator().manual_seed(0)
    plain, sums = (Maps(*FORMS, cpu, HostMemory()) for _ in range(2))
    with simulated(1, late=late) as gpus:
        gpu = torch.device("cuda", 0)
        host = HostMemory(Copies.for_device(gpu))
        ours, our_sums = (StripMaps(*FORMS, gpu, host, cuts=CUTS) for _ in range(2))

        def numbers(box: Box) -> torch.Tensor:
            values = torch.randn(2, 3, box[0].size, box[1].size, generator=generator)
            return values.contiguous(memory_format=layout)

        for cells in (CELLS, UNEVEN):
            for box in cells:
                value = numbers(box)
                plain.write(NAME, box, value)
                ours.write(NAME, box, value.to(gpu))
            for box in (*RIMS, *UNEVEN):
                value = numbers(box)
                sums.add(NAME, box, value)
                our_sums.add(NAME, box, value.to(gpu))
            for expected, maps in ((plain, ours), (sums, our_sums)):
                for box, following in zip(RIMS, [*RIMS[1:], UNEVEN[0]], strict=True):
                    maps.begin(NAME, following)
                    ours_there = maps.fetch(NAME, box).cpu()
                    there = expected.fetch(NAME, box)
                    assert torch.equal(ours_there, there)
                    assert ours_there.is_contiguous(memory_format=layout)
        our_sums.take(NAME)
        our_sums.add(NAME, UNEVEN[0], numbers(UNEVEN[0]).to(gpu))
        assert our_sums.fetch(NAME, UNEVEN[1]).count_nonzero() == 0, "rows that nobody wrote are zeros"
        assert gpus.found == []
