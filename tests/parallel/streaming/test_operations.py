"""Every kind of operation, box by box, gives what torch gives for the whole image: outputs, and all gradients."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from timm.layers import BatchNormAct2d, BlurPool2d, Conv2dSame, DropPath, EcaModule, ScaledStdConv2d
from timm.layers.grn import GlobalResponseNorm
from torch import Tensor, nn
from torchvision.ops import SqueezeExcitation, StochasticDepth

from models.blocks import ChannelNorm, FrozenBatchNorm2d
from tests.helpers.streaming import streaming_error
from tests.helpers.team_operations import Call, Network, UpToSize

EXACT = 1e-12
numbers = st.integers
few = settings(max_examples=settings().max_examples * 2 // 5)


def exact(operation: nn.Module, height: int, width: int, box: int, channels: int = 4) -> None:
    torch.manual_seed(0)
    try:
        with torch.no_grad():
            whole = Network(operation, channels)(torch.zeros(1, 2, height, width))
    except RuntimeError:  # a kernel larger than what it works on
        return
    if whole.numel():
        assert streaming_error(Network(operation, channels), (2, 2, height, width), box) <= EXACT


sides, boxes = numbers(7, 29), numbers(3, 13)


@few
@given(sides, sides, boxes, numbers(1, 4), numbers(1, 3), numbers(1, 3), numbers(0, 4), st.sampled_from([1, 2, 4]))
def test_convolution(h: int, w: int, box: int, k: int, s: int, d: int, p: int, groups: int) -> None:
    """Also p larger than the reach: needed rows that lie wholly outside."""
    exact(nn.Conv2d(4, 4, (k, 3), (s, 1), (p, 1), (d, 1), groups), h, w, box)


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@few
@given(sides, sides, boxes, numbers(1, 5), numbers(1, 3))
def test_same_convolution_even_kernels_pad_at_the_end(h: int, w: int, box: int, k: int, d: int) -> None:
    exact(nn.Conv2d(4, 4, k, padding="same", dilation=d), h, w, box)


@few
@given(sides, sides, boxes, numbers(1, 4), numbers(1, 5), numbers(1, 2), numbers(0, 2), numbers(0, 4))
def test_transposed_convolution(h: int, w: int, box: int, k: int, s: int, d: int, p: int, extra: int) -> None:
    """Also strides larger than the kernel: rows without a source, on both sides."""
    extra = min(extra, max(s, d) - 1)
    exact(nn.ConvTranspose2d(4, 4, k, s, p, extra, dilation=d), h, w, box)


@few
@given(sides, sides, boxes, numbers(2, 4), numbers(1, 4), numbers(1, 2), st.booleans())
def test_max_pool(h: int, w: int, box: int, k: int, s: int, d: int, ceil: bool) -> None:
    """Padded by minus infinity; ties go to the same px."""
    exact(nn.Sequential(nn.Hardtanh(-0.2, 0.2), nn.MaxPool2d(k, s, k // 2, d, ceil_mode=ceil)), h, w, box)


@few
@given(sides, sides, boxes, numbers(2, 4), numbers(1, 4), st.booleans(), st.booleans(), st.sampled_from([None, 3]))
def test_average_pool(h: int, w: int, box: int, k: int, s: int, ceil: bool, counts: bool, divisor: int | None) -> None:
    exact(nn.AvgPool2d(k, s, k // 2, ceil, counts, divisor), h, w, box)


@few
@given(sides, sides, boxes, numbers(3, 40), numbers(3, 40), st.sampled_from(["nearest", "nearest-exact", "bilinear"]))
def test_resampling_to_a_size(h: int, w: int, box: int, rows: int, columns: int, mode: str) -> None:
    exact(nn.Upsample((rows, columns), mode=mode), h, w, box)


@few
@given(sides, sides, boxes, st.sampled_from([0.5, 1.3, 2.0, 3.0]), st.booleans())
def test_resampling_by_a_factor(h: int, w: int, box: int, factor: float, aligned: bool) -> None:
    exact(nn.Upsample(scale_factor=factor, mode="bilinear", align_corners=aligned), h, w, box)


@few
@given(sides, sides, boxes, numbers(-2, 6), numbers(-2, 6), st.sampled_from(["constant", "reflect", "replicate"]))
def test_pads_and_crops(h: int, w: int, box: int, before: int, after: int, mode: str) -> None:
    fill = 0.5 if mode == "constant" else None
    exact(Call(lambda x: F.pad(x, (before, after, after, before), mode, fill)), h, w, box)


@few
@given(sides, sides, boxes, numbers(1, 4), numbers(1, 3), numbers(0, 4), st.sampled_from(["reflect", "replicate"]))
def test_convolution_padded_by_rows_of_the_map(h: int, w: int, box: int, k: int, s: int, p: int, mode: str) -> None:
    exact(nn.Conv2d(4, 4, (k, 3), (s, 1), (p, 1), padding_mode=mode), h, w, box)


@few
@given(sides, sides, boxes, numbers(2, 9), numbers(2, 9))
def test_adaptive_pool_to_cells_that_overlap(h: int, w: int, box: int, rows: int, columns: int) -> None:
    exact(nn.AdaptiveAvgPool2d((rows, columns)), h, w, box)


@few
@given(sides, sides, boxes, numbers(0, 3), numbers(1, 3), numbers(1, 3))
def test_slices(h: int, w: int, box: int, start: int, less: int, step: int) -> None:
    exact(Call(lambda x: x[:, :, start:-less:step, 1:]), h, w, box)


def channel_shuffle(x: Tensor) -> Tensor:
    first, second = torch.chunk(x, 2, dim=1)
    return torch.cat((second, first + second), dim=1)


def stacked_last(x: Tensor) -> Tensor:
    both = torch.stack([x, x * x], axis=-1)  # type: ignore[call-arg]
    return both.permute(0, 4, 1, 2, 3).sum(1)


LAST = Call(lambda x: x.permute(0, 2, 3, 1))


KINDS: dict[str, tuple[nn.Module, int]] = {
    "relu": (nn.ReLU(), 4),
    "relu in place": (nn.ReLU(inplace=True), 4),
    "gelu": (nn.GELU(), 4),
    "hardswish in place": (nn.Hardswish(inplace=True), 4),
    "frozen norm": (FrozenBatchNorm2d(4), 4),
    "layer norm": (ChannelNorm(4), 4),
    "batch norm": (nn.BatchNorm2d(4), 4),
    "batch norm without statistics": (nn.BatchNorm2d(4, track_running_stats=False), 4),
    "group norm": (nn.GroupNorm(2, 4), 4),
    "instance norm": (nn.InstanceNorm2d(4), 4),
    "instance norm with scale": (nn.InstanceNorm2d(4, affine=True), 4),
    "residual": (Call(lambda x: x + F.relu(x)), 4),
    "sum in place": (Call(lambda x: (2 * x).add_(x)), 4),
    "cat": (Call(lambda x: torch.cat([x, -x], 1)), 8),
    "cat by axis": (Call(lambda x: torch.cat([x, -x], axis=1)), 8),
    "chunk": (Call(channel_shuffle), 4),
    "channels": (Call(lambda x: x[:, 1:3]), 2),
    "softmax": (nn.Softmax(dim=1), 4),
    "transposed dims": (Call(lambda x: x.transpose(2, 3) * 2), 4),
    "dims by name": (Call(lambda x: torch.transpose(torch.permute(x, dims=(0, 3, 2, 1)), dim0=1, dim1=3) * 2), 4),
    "linear over channels": (nn.Sequential(LAST, nn.Linear(4, 5), Call(lambda x: x.permute(0, 3, 1, 2))), 5),
    "channel shuffle": (Call(lambda x: x.view(-1, 2, 2, x.size(2), x.size(3)).transpose(1, 2).reshape(x.shape)), 4),
    "squeeze and excite": (SqueezeExcitation(4, 2), 4),
    "mean": (Call(lambda x: x * x.mean((2, 3), keepdim=True)), 4),
    "sum": (Call(lambda x: x - 0.01 * x.sum(dim=[2, 3])[:, :, None, None]), 4),
    "channel mean": (Call(lambda x: x * x.mean(1, keepdim=True)), 4),
    "batch norm with activation": (BatchNormAct2d(4, act_layer=nn.SiLU), 4),
    "functional batch norm": (Call(lambda x: F.batch_norm(x, None, None, training=True)), 4),
    "functional group norm": (Call(lambda x: F.group_norm(x, 2)), 4),
    "functional instance norm": (Call(F.instance_norm), 4),
    "global response norm": (GlobalResponseNorm(4, channels_last=False), 4),
    "variance": (Call(lambda x: x / x.var((2, 3), keepdim=True)), 4),
    "deviation of tiles": (Call(lambda x: x / x.std(dim=(1, 2, 3), unbiased=False, keepdim=True)), 4),
    "mean of tiles": (Call(lambda x: x - x.mean((1, 2, 3), keepdim=True)), 4),
    "generalised mean": (Call(lambda x: x * F.avg_pool2d(x.clamp(min=0.1) ** 3, x.shape[2:]) ** (1 / 3)), 4),
    "largest channel": (Call(lambda x: x * x.amax(1, keepdim=True)), 4),
    "stack": (Call(lambda x: torch.stack([x, x * x, -x], 1).sum(1)), 4),
    "stack by axis": (Call(stacked_last), 4),
    "transposed convolution to a size": (UpToSize(), 4),
    "weights standardised": (ScaledStdConv2d(4, 4, 3, padding=1), 4),
    "channel attention by a convolution": (EcaModule(4), 4),
    "blurred pool": (BlurPool2d(4, filt_size=4), 4),
    "padding by the size": (Conv2dSame(4, 4, 3, stride=2), 4),
    "dropout of channels": (nn.Dropout2d(0.5), 4),
    "dropped paths": (DropPath(0.5), 4),
    "stochastic depth": (StochasticDepth(0.5, "row"), 4),
    "functional dropout of nothing": (Call(lambda x: F.dropout(x, 0.5, training=False) * 2), 4),
    "dropout of nothing": (nn.Dropout(0.0), 4),
    "identity": (nn.Identity(), 4),
}


@pytest.mark.parametrize("kind", KINDS)
def test_kinds(kind: str) -> None:
    for height, width, box in ((16, 16, 5), (13, 21, 8)):
        exact(KINDS[kind][0], height, width, box, KINDS[kind][1])


@pytest.mark.parametrize("sizes", [(16, 16), (20, 12)])
def test_pixel_shuffles(sizes: tuple[int, int]) -> None:
    for box in (3, 7):
        exact(nn.PixelShuffle(2), *sizes, box, 1)
        exact(nn.PixelUnshuffle(2), *sizes, box, 16)
        exact(nn.AdaptiveAvgPool2d((sizes[0] // 4, sizes[1] // 2)), *sizes, box)
