"""Whole models box by box beside the plain step, and what is refused by name; the traps of spatial computation that a
single device can fall into."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from app.training.exactness import CroppedImages
from benchmarks.in_boxes import planned_regions, streamed
from models.blocks import make_norm
from models.registry import build_model
from models.resnet import BasicBlock
from parallel.build import _plans
from parallel.memory.policy import ActivationPolicy
from parallel.offload.host_memory import HostMemory
from parallel.space.cuts import Span
from parallel.space.team import Box
from parallel.strategy import Strategy
from parallel.streaming.maps import Maps
from parallel.streaming.part_plan import PartPlan
from parallel.streaming.part_run import run_box
from parallel.team.boxed_nodes import PlannedRegion
from parallel.trace.stage_module import Boxes
from parallel.trace.trace import trace
from tests.helpers.lanes import long_where
from tests.helpers.plain_step import TOLERANCE, relative_errors
from tests.helpers.small_nets import Made
from tests.helpers.streaming import in_boxes


def residual(norm: Any) -> nn.Module:
    """A ResNet in small: its stem, a block that keeps the size of maps and one that halves it, its head."""
    stem = nn.Conv2d(3, 8, 7, 2, 3, bias=False), make_norm(norm, 8), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)
    blocks = BasicBlock(8, 8, 1, norm), BasicBlock(8, 16, 2, norm)
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 3))


def model_of(name: str, norm: str = "frozen") -> nn.Module:
    """With statistics that are not those of a fresh model, and without dropout of single px."""
    torch.manual_seed(0)
    model = residual(norm) if name == "residual" else build_model(name, classes=3, norm=norm)
    for part in model.modules():
        if isinstance(part, nn.BatchNorm2d):
            nn.init.normal_(part.running_mean, 0.0, 0.1)
            nn.init.uniform_(part.running_var, 0.5, 2.0)
    return model.train()


def step(model: nn.Module, images: Tensor | Boxes) -> tuple[Tensor, dict[str, Tensor]]:
    """Output and gradients; the same random numbers each time."""
    torch.manual_seed(5)
    output = model(images)
    generator = torch.Generator().manual_seed(3)
    weights = torch.randn(output.shape, generator=generator, dtype=torch.float64).to(output.dtype)
    (output * weights).mean().backward()
    return output.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def error(name: str, norm: str, tile: int, box: int, dtype: torch.dtype) -> float:
    plain = model_of(name, norm).to(dtype)
    images = torch.randn(2, 3, tile, tile + (32 if "unet" in name else 5), dtype=torch.float64).to(dtype)
    ours = streamed(copy.deepcopy(plain), box, tuple(images.shape))
    (expected, gradients), (found, ours_gradients) = step(plain, images), step(ours, images)
    assert gradients.keys() == ours_gradients.keys()
    errors = relative_errors(gradients, ours_gradients) | relative_errors({"": expected}, {"": found})
    return max(errors.values())


F64, F32 = torch.float64, torch.float32
SMALL = {"residual": (67, 40), "unet_w4": (64, 24), "unet(2,4)": (64, 24)}
LARGE = {"timm:resnetv2_50": (97, 50), "torchvision:densenet121": (97, 50), "torchvision:efficientnet_b0": (97, 40)}
LARGE |= {"torchvision:deeplabv3_resnet50": (65, 50), "torchvision:shufflenet_v2_x0_5": (97, 40)}
"""One of each way to join layers that the small ones have not."""
QUICK = [("residual", "frozen", *SMALL["residual"], dtype) for dtype in TOLERANCE]
QUICK += [("unet_w4", "frozen", *SMALL["unet_w4"], F64)]
CASES = [*QUICK, ("torchvision:convnext_tiny", "batch", 97, 50, F64)]
CASES += [(name, "frozen", *sides, F64) for name, sides in LARGE.items()]
CASES += [(name, "frozen", *SMALL[name], F32) for name in ("unet_w4", "unet(2,4)")]
CASES += [
    (name, norm, *sides, F32 if norm == "layer" else F64)
    for name, sides in SMALL.items()
    for norm in {"residual": ("batch", "instance"), "unet_w4": ("batch", "group", "layer")}.get(name, ())
]
"""(model, norm, px of a tile, px of a box, type): tiles are no power of two."""


@pytest.mark.parametrize(
    ("name", "norm", "tile", "box", "dtype"), long_where(CASES, *(c for c in CASES if c not in QUICK))
)
def test_exact(name: str, norm: str, tile: int, box: int, dtype: torch.dtype) -> None:
    assert error(name, norm, tile, box, dtype) <= TOLERANCE[dtype]


def test_running_statistics_are_those_of_the_plain_step_whatever_the_tiles() -> None:
    plain = model_of("unet_w4", "batch").double()
    ours = streamed(copy.deepcopy(plain), 24, (2, 3, 48, 64))
    for seed, shape in enumerate(((2, 3, 48, 64), (1, 3, 32, 64), (2, 3, 48, 64))):
        images = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        torch.testing.assert_close(step(ours, images), step(plain, images), rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(dict(ours.named_buffers()), dict(plain.named_buffers()), rtol=1e-11, atol=1e-12)


def test_a_norm_that_is_called_twice_counts_in_the_order_of_the_model() -> None:
    """First on the deeper map, whose statistics boxes know later."""

    def compute(m: Any, x: Tensor) -> Tensor:
        y = m.first(x)
        return m.norm(m.second(m.other(y))) + m.norm(y)

    parts = {"first": nn.Conv2d(3, 4, 3, padding=1), "second": nn.Conv2d(4, 4, 3, padding=1)}
    plain = Made(compute, **parts, norm=nn.BatchNorm2d(4), other=nn.BatchNorm2d(4)).double()
    images = torch.randn(2, 3, 24, 20, dtype=torch.float64)
    ours = streamed(copy.deepcopy(plain), 8, tuple(images.shape))
    torch.testing.assert_close(step(ours, images), step(plain, images), rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(dict(ours.named_buffers()), dict(plain.named_buffers()), rtol=1e-11, atol=1e-12)


def test_maps_recomputed_in_a_later_phase_give_the_gradients_of_the_plain_step() -> None:
    """With fewer bytes on the host than where they are stored."""
    model = model_of("residual", "batch").double()
    images = torch.rand(2, 3, 67, 67, dtype=torch.float64)
    expected = step(copy.deepcopy(model), images)
    usual = None
    for share in (1.0, 0.6):
        run = streamed(copy.deepcopy(model), 40, tuple(images.shape), usual and int(usual * share))
        (plan,) = planned_regions(run, tuple(images.shape))
        usual = usual or plan.run.boxes.host_bytes
        assert plan.run.boxes.host_bytes <= share * usual
        torch.testing.assert_close(step(run, images), expected, rtol=0, atol=1e-10)


def test_a_backward_pass_computes_and_fetches_what_gradients_need_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Frozen first layers were computed again, and stored maps that no operation reads came from the host."""

    def compute(m: Any, x: Tensor) -> Tensor:
        y = torch.relu(m.norms[0](m.convs[0](x)))
        return (y + m.norms[1](m.convs[1](y))).mean((2, 3))

    convs = nn.ModuleList([nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 1)])
    plain = Made(compute, convs=convs, norms=nn.ModuleList(nn.BatchNorm2d(4) for _ in convs)).double()
    for frozen in (plain.convs[0], plain.norms[0]):
        frozen.requires_grad_(False)
    images = torch.randn(2, 3, 34, 34, dtype=torch.float64)
    ours = streamed(copy.deepcopy(plain), 16, tuple(images.shape))
    computed, fetched, fetch = list[set[str]](), set[str](), Maps.fetch

    def noted(maps: Maps, name: str, box: Box) -> Tensor:
        fetched.add(name)
        return fetch(maps, name, box)

    def run(module: nn.Module, part: PartPlan, *rest: Any) -> Any:
        if len(rest) < 6:  # in the forward pass nothing is stored yet
            return run_box(module, part, *rest)
        computed.append({each.name for each in part.steps})
        with monkeypatch.context() as patch:
            patch.setattr(Maps, "fetch", noted)
            return run_box(module, part, *rest)

    monkeypatch.setattr("parallel.team.region_run.run_box", run)
    torch.testing.assert_close(step(ours, images), step(plain, images), rtol=0, atol=1e-10)
    (plan,) = planned_regions(ours, tuple(images.shape))
    assert isinstance(plan, PlannedRegion)
    region = plan.run.region
    assert computed
    assert all(names & region.flows for names in computed)
    assert fetched
    assert all(region.operations[name].again for name in fetched)


def skipping(takes: bool) -> nn.Module:
    """What spans the image comes in between, and what follows it takes the image itself, or its shape alone."""

    def compute(m: Any, x: Tensor) -> Tensor:
        mixed = m.mix(m.conv(x).softmax(2).transpose(1, 3)).transpose(1, 3)
        grown = nn.functional.interpolate(mixed, size=x.shape[2:], mode="nearest")
        return grown + x if takes else grown

    return Made(compute, conv=nn.Conv2d(3, 3, 3, 2, 1), mix=nn.Linear(3, 3))


class _Watched(CroppedImages):
    largest = 0

    def box(self, rows: Span, columns: Span) -> Tensor:
        self.largest = max(self.largest, rows.size * columns.size)
        return super().box(rows, columns)


@pytest.mark.parametrize("name", ["unet_w4", "image", "shape"])
def test_images_by_boxes_give_what_whole_ones_give(name: str) -> None:
    torch.manual_seed(0)
    net = skipping(name == "image") if name in ("image", "shape") else model_of(name)
    plain = net.double().to(memory_format=torch.channels_last)
    images = torch.randn(2, 3, 64, 96, dtype=torch.float64).contiguous(memory_format=torch.channels_last)
    ours = streamed(copy.deepcopy(plain), 32, tuple(images.shape))
    boxes = _Watched(images)
    assert isinstance(boxes, Boxes)
    torch.testing.assert_close(step(ours, boxes), step(plain, images), rtol=1e-10, atol=1e-12)
    ours.eval()
    plain.eval()
    torch.testing.assert_close(ours(boxes), plain(images), rtol=1e-10, atol=1e-12)
    assert isinstance(planned_regions(ours, tuple(images.shape), training=False)[0], PlannedRegion)
    if name in ("image", "shape"):
        assert (boxes.largest == 64 * 96) == (name == "image")


def test_plans_of_few_shapes_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("parallel.build.MOST_PLANS", 2)
    net = nn.Sequential(nn.Conv2d(3, 2, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    plans = _plans(trace(net, (1, 3, 24, 24)), Strategy("single", 1, 1, 1, policy=ActivationPolicy(stream=16)))
    first, second = (plans((1, 3, 24, width), True) for width in (24, 32))
    assert plans((1, 3, 24, 24), True) is first
    plans((1, 3, 24, 40), True)
    assert plans((1, 3, 24, 24), True) is first
    assert plans((1, 3, 24, 32), True) is not second


def test_hooks_fire_once_per_parameter_and_step() -> None:
    ours = streamed(model_of("residual").double(), 32, (1, 3, 64, 64))
    fired: dict[str, int] = {}
    for name, parameter in ours.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: fired.update({name: fired.get(name, 0) + 1}))
    ours(torch.randn(1, 3, 64, 64, dtype=torch.float64)).sum().backward()
    assert fired == {name: 1 for name, _ in ours.named_parameters()}


def test_channels_last_stays() -> None:
    """Maps that are joined or padded in another layout are copied at every convolution."""
    model = model_of("residual").to(memory_format=torch.channels_last)
    images = torch.randn(1, 3, 64, 64).contiguous(memory_format=torch.channels_last)
    ours = streamed(model, 32, (1, 3, 64, 64))
    seen = []
    for part in model.modules():
        if isinstance(part, nn.BatchNorm2d):
            part.register_forward_hook(
                lambda _, given, __: seen.append(given[0].is_contiguous(memory_format=torch.channels_last))
            )
    ours(images).sum().backward()
    assert len(seen) > 12
    assert all(seen)


class _Doubled(nn.BatchNorm2d):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def test_norms_of_unknown_kinds_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"cannot pass _1 .* use --norm frozen"):
        streamed(nn.Sequential(nn.Conv2d(3, 4, 3), _Doubled(4)), 32, (1, 3, 64, 64))


def test_a_parameter_updated_before_the_backward_pass_is_autograds_error() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3))
    (output,) = in_boxes(net, 8)(net, torch.randn(1, 3, 16, 16))
    with torch.no_grad():
        net[0].bias.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


def test_maps_beyond_the_budget_of_the_host_lie_in_files(tmp_path: Path) -> None:
    """With the same bits in the gradients."""
    model, images = model_of("unet_w4", "batch"), torch.randn(2, 3, 64, 64)
    results = []
    for budget in (None, 1 << 18):
        host = HostMemory(None, budget, tmp_path)
        ours = streamed(copy.deepcopy(model), 32, tuple(images.shape), None, host)
        results.append(step(ours, images))
        (plan,) = planned_regions(ours, tuple(images.shape))
        if budget is None:
            assert (host.peak_bytes, host.peak_file_bytes) == (plan.run.boxes.host_bytes, 0)
        else:
            assert host.peak_bytes <= budget < plan.run.boxes.host_bytes - budget <= host.peak_file_bytes
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=0)


class Operations(TorchDispatchMode):
    """Counts what a device computes: operations, but views and empty memory."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not (operation.is_view or "empty" in operation.name() or "detach" in operation.name())
        return operation(*args, **(kwargs or {}))


def test_operations_of_a_norm_in_boxes() -> None:
    """A GPU waits for the host in small boxes: operations for each box, of a norm and the convolution before it."""

    def of_norms(count: int) -> int:
        layers = [layer for _ in range(count) for layer in (nn.Conv2d(3, 3, 3, 1, 1), nn.BatchNorm2d(3), nn.ReLU())]
        net, images = nn.Sequential(*layers, nn.Conv2d(3, 3, 1)), torch.randn(1, 3, 32, 32)
        net.to(memory_format=torch.channels_last)
        boxed = streamed(net, 16, tuple(images.shape))
        boxed(images).sum().backward()
        with Operations() as operations:
            boxed(images).sum().backward()
        return operations.count

    boxes = 4
    assert (of_norms(5) - of_norms(3)) / 2 / boxes <= 45
