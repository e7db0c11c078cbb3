"""Traps of computing a map in pieces that others fell into; each test begins with what went wrong there."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.ops import drop_block2d

from benchmarks.in_boxes import planned_regions, streamed
from models.blocks import FrozenBatchNorm2d
from parallel.space.cuts import Span
from parallel.space.rule import Resample
from parallel.streaming import part_plan
from parallel.streaming.local_ops import resample
from parallel.streaming.patch import Patch
from parallel.team.boxed_nodes import PlannedRegion
from tests.helpers.small_nets import Made
from tests.helpers.streaming import end_of_boxes, in_boxes, streaming_error
from tests.helpers.team_operations import Call

EXACT = 1e-12


def called(function: Callable[[Tensor], Tensor]) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), Call(function))


def shifted(channels: int) -> FrozenBatchNorm2d:
    """A norm that makes something other than zero of zeros."""
    norm = FrozenBatchNorm2d(channels)
    nn.init.constant_(norm.running_mean, -0.7)
    return norm


def four_layers() -> nn.Module:
    return nn.Sequential(*(part for _ in range(4) for part in (nn.Conv2d(3, 3, 3, padding=1), shifted(3), nn.ReLU())))


def padded_and_changed(m: Any, x: Tensor) -> Tensor:
    y = m.first(x)
    return m.change(F.pad(y, (1, 1, 1, 1), "reflect"))[:, :, 1:-1, 1:-1] + y


def resized() -> nn.Module:
    return Made(lambda m, x: F.interpolate(m.conv(x), size=x.shape[-2:], mode="bilinear"), conv=nn.Conv2d(3, 4, 3, 2))


def two_that_leave(pool: Callable[[Tensor], Tensor]) -> nn.Module:
    """Two maps that later boxes take, and whose sum is taken behind the boxes."""

    def compute(m: Any, x: Tensor) -> Tensor:
        first = F.relu(m.norms[0](m.convs[0](x)))
        second = first + m.norms[1](m.convs[1](first))
        third = second + m.norms[2](m.convs[2](second))
        return torch.cat([third.amax((2, 3)), pool(first + second)], 1)

    convs = nn.ModuleList(nn.Conv2d(channels, 4, 3, padding=1, bias=False) for channels in (3, 4, 4))
    return Made(compute, convs=convs, norms=nn.ModuleList(nn.BatchNorm2d(4) for _ in range(3)))


TRAPS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int]] = {
    # MPI4DL pads the image once, and computes convolution, norm and ReLU of what lies outside: 29 % off.
    "rows outside the image are zero at every layer": (four_layers, (2, 3, 23, 31), 8),
    # MPI4DL pads by 0, which is the largest where all is negative.
    "maxima are padded by minus infinity": (
        lambda: called(lambda x: F.max_pool2d(-x.abs() - 1, 3, 2, 1)), (2, 3, 23, 31), 8),
    # PhysicsNeMo takes a halo of half the kernel: 4 + 4 rows where there are 7, as in Inception's stem.
    "the first needed row follows the stride": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3, 2), nn.Conv2d(4, 4, 3, 2), nn.MaxPool2d(3, 2)), (1, 3, 61, 67), 16),
    # XLA's halos ended at the neighbour: dilation 9 in boxes of 6 reaches over three of them.
    "rims wider than a box": (lambda: nn.Conv2d(3, 4, 3, padding=9, dilation=9), (1, 3, 40, 37), 6),
    # MPI4DL's are of each part, rims among them; diffusers' of VAE tiles leave out what is between parts.
    "statistics count each px once and weigh uneven boxes": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 4, 5, padding=2), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3), nn.GroupNorm(2, 4)
        ), (2, 3, 37, 29), 11),
    # A map of one px is in one box; others are empty.
    "norms of a single px": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 8, 8), shifted(4), nn.Conv2d(4, 4, 3, padding=1)), (2, 3, 15, 15), 4),
    # That of a root is infinite at zero, and infinity times zero no number.
    "norms of nothing have no gradient": (
        lambda: called(lambda x: x + F.relu(x - 100).norm(p=2, dim=(2, 3), keepdim=True)), (1, 3, 18, 18), 8),
    # A box without a pad around it is the map itself.
    "what is padded is not changed in place": (
        lambda: Made(padded_and_changed, first=nn.Conv2d(3, 4, 3), change=nn.ReLU(inplace=True)), (1, 3, 30, 30), 6),
    # Autograd hands the gradient of a sum to both of its maps, in the same memory, to which boxes added.
    "maps that leave have a gradient each": (
        lambda: two_that_leave(lambda both: both.mean((2, 3))), (2, 3, 24, 20), 8),
    # That of a sum over px is one number for all of them.
    "maps that leave have a gradient of each px": (
        lambda: two_that_leave(lambda both: both.flatten(2).sum(-1)), (2, 3, 24, 20), 8),
    # A model that resamples to ``x.shape`` would resample to that of the box.
    "sizes are those of the whole image": (resized, (1, 3, 29, 22), 9),
}  # fmt: skip


@pytest.mark.parametrize("trap", TRAPS)
def test_exact(trap: str) -> None:
    make, shape, box = TRAPS[trap]
    assert streaming_error(make(), shape, box) <= EXACT


def test_coordinates_of_resampling_are_rounded_as_torch_rounds_them() -> None:
    """At 16k px in float32 a coordinate is off by 1e-3 rows of what float64 says."""
    side, size = 5461, 16384
    row = torch.randn(1, 1, side, 1)
    rules = (Resample(size, None, "linear"), Resample(1, None, "linear"))
    expected = F.interpolate(row, (size, 1), mode="bilinear")
    for start in (0, 9_000, 16_000):
        box = (Span(start, start + 384), Span(0, 1))
        has = (rules[0].need(box[0], side), Span(0, 1))
        patch = Patch(row[:, :, slice(*has[0])], has, has, box, (side, 1), (2, 3))
        error = (resample(patch, rules) - expected[:, :, start : start + 384]).abs().max()
        assert error < 1e-5 * expected.abs().max()


def test_moments_do_not_cancel() -> None:
    """Of sums of squares in float32, at a mean of 1,000 deviations, 6 % of the variance are left to chance."""
    net = nn.Sequential(nn.Identity(), nn.BatchNorm2d(1, affine=False))
    images = 1000 + torch.randn(1, 1, 41, 53, generator=torch.Generator().manual_seed(0))
    in_boxes(net, 16)(net, images)
    variance = net[1].running_var
    torch.testing.assert_close(10 * variance - 9, images.double().var()[None].float(), rtol=1e-4, atol=0.0)


def test_parameters_whose_gradients_are_one_tensor_are_summed_apart() -> None:
    """Autograd hands the gradient of a sum to both of its terms, in the same memory."""

    def scaled() -> nn.Module:
        first, second = (nn.Parameter(torch.randn(1, 4, 1, 1)) for _ in range(2))
        return Made(lambda m, x: m.conv(x) * (m.first + m.second), conv=nn.Conv2d(3, 1, 3), first=first, second=second)

    assert streaming_error(scaled(), (1, 3, 20, 20), 6) <= EXACT
    net = scaled()
    in_boxes(net, 6)(net, torch.randn(1, 3, 20, 20))[0].sum().backward()
    assert net.first.grad.data_ptr() != net.second.grad.data_ptr()


def forgetful(x: Tensor) -> Tensor:
    y = x * 1
    y.relu_()
    return y + 1


def folded(x: Any) -> Tensor:
    top, bottom = x.chunk(2, axis=2)
    return top + bottom


class Doubled(nn.Conv2d):
    def _conv_forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return 2 * super()._conv_forward(x, weight, bias)


SQUARE = functools.partial(nn.Conv2d, 4, 4, 1)


def doubled() -> nn.Module:
    layer = SQUARE()
    layer._conv_forward = lambda x, weight, bias: 2 * F.conv2d(x, weight, bias)
    return layer


LARGEST = "takes the largest of the whole image, which boxes do not add up: use an average pool"


@pytest.mark.filterwarnings("ignore:Implicit dimension choice")
@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (lambda: nn.AdaptiveMaxPool2d(1), LARGEST),
        (lambda: Call(lambda x: torch.linalg.vector_norm(x, ord=1, dim=(2, 3))), "is a norm of order 1: use 2"),
        (lambda: Call(lambda x: x.sum((2, 3), dtype=torch.float32)), "is given dtype"),
        (lambda: Call(forgetful), "changes mul in place, which is used again by that name"),
        (lambda: Doubled(4, 4, 1), "is a Doubled, which computes other than Conv2d: use layers"),
        (doubled, "has a forward of its own on the instance"),
        (lambda: nn.utils.spectral_norm(SQUARE()), "has hooks, which would run for each box"),
        (lambda: nn.Dropout(0.5), "draws a number for each px"),
        (lambda: nn.InstanceNorm2d(4, track_running_stats=True), "keeps running statistics of each tile: set track_r"),
        (lambda: Call(lambda x: x.flatten(2).softmax(-1)), "makes other dims of rows and columns"),
        (lambda: Call(lambda x: F.conv2d(x, x[:, :, :3, :3])), "takes several maps where boxes know one"),
        (lambda: nn.Softmax(), "is given no dim"),
        (lambda: Call(folded), "works along rows or columns"),
    ],
)
def test_the_first_layer_that_boxes_do_not_know_is_refused_by_name(layer: Callable[[], nn.Module], reason: str) -> None:
    """Read as a kind that is known, it would give other numbers; from there on the model is computed whole."""
    torch.manual_seed(0)
    assert end_of_boxes(nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), layer()))[1].startswith(reason)


def test_two_backward_passes_are_refused() -> None:
    net = nn.Conv2d(3, 4, 3)
    loss = in_boxes(nn.Sequential(net), 8)(nn.Sequential(net), torch.randn(1, 3, 18, 18))[0].sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="goes back once"):
        loss.backward()


def mean(y: Tensor) -> Tensor:
    return y.mean((2, 3), keepdim=True)


def normed(m: Any, y: Tensor) -> Tensor:
    return F.batch_norm(y, m.norm.running_mean, m.norm.running_var, training=True)


def standardised(m: Any, y: Tensor) -> Tensor:
    weight = F.batch_norm(m.second.weight.view(1, 4, 4), None, None, training=True)
    return F.conv2d(y, weight.view(4, 4, 1, 1))


def changed_twice(m: Any, y: Tensor) -> Tensor:
    z = m.second(y)
    z.mul_(0.5).add_(y)
    return z


def changed_gate(m: Any, y: Tensor) -> Tensor:
    s = mean(y)
    s.sigmoid_()
    return y * s


def drawn_and_scaled(m: Any, y: Tensor) -> Tensor:
    r = y.new_empty((4, 1, 1, 1)).bernoulli_(0.7)
    r.div_(0.7)
    return y * r


def assigned(m: Any, y: Tensor) -> Tensor:
    z = 2 * y
    z[:, :2] = m.second(y)[:, :2]
    return z


def divided(m: Any, y: Tensor) -> Tensor:
    y[:, :2] /= 2
    return y


def canvas(m: Any, y: Tensor) -> Tensor:
    both = y.new_zeros(y.shape)
    both[:, :2] = y[:, :2]
    return both


MIDDLES: dict[str, tuple[Callable[[Any, Tensor], Tensor], bool]] = {
    "a gate that draws and counts": (lambda m, y: y * torch.sigmoid(m.dropout(m.norm(mean(y)))), True),
    "a gate of a functional dropout": (lambda m, y: y * F.dropout(mean(y), 0.4, m.training), True),
    "a gate of a functional batch norm": (lambda m, y: y * normed(m, mean(y)), True),
    "a gate that is changed in place": (changed_gate, True),
    "a mean that an activation changes in place": (lambda m, y: y * torch.sigmoid(m.second(m.act(mean(y)))), False),
    "a gate of truth values": (lambda m, y: y * (mean(y) > 0), False),
    "factors changed after they are drawn": (drawn_and_scaled, False),
    "a functional batch norm": (normed, False),
    "standardised weights": (standardised, False),
    "a map that is changed twice": (changed_twice, True),
    "assigned parts": (assigned, True),
    "divided parts": (divided, True),
    "parts of a new tensor": (canvas, True),
    "an activation as a function in place": (lambda m, y: F.leaky_relu_(m.second(y), 0.3), False),
    "a function that is off": (lambda m, y: drop_block2d(m.act(y), 0.3, 3, training=False), False),
    "an unknown function in place": (lambda m, y: drop_block2d(m.second(y), 0.3, 3, True, 1e-6, m.training), True),
}
"""What is between two convolutions, and whether boxes end there."""


@pytest.mark.parametrize("middle", MIDDLES)
def test_what_counts_draws_or_changes_does_so_once(middle: str) -> None:
    """Boxes computed gates again in the backward pass: batch norm counted twice, dropout drew other numbers, and
    gradients were a quarter off. They left assignments, and functions that change their argument, out."""
    torch.manual_seed(0)
    compute, ends = MIDDLES[middle]
    net = Made(
        lambda m, x: m.last(compute(m, m.first(x))),
        first=nn.Conv2d(3, 4, 3, padding=1),
        second=nn.Conv2d(4, 4, 1),
        norm=nn.BatchNorm2d(4),
        dropout=nn.Dropout(0.5),
        act=nn.SiLU(inplace=True),
        last=nn.Conv2d(4, 2, 1),
    ).double()
    ours = streamed(copy.deepcopy(net), 8, (4, 3, 20, 20))
    images = torch.randn(4, 3, 20, 20, dtype=torch.float64)
    for module in (net, ours):
        torch.manual_seed(1)
        module(images).square().sum().backward()
    for name, parameter in net.named_parameters():
        torch.testing.assert_close(ours.get_parameter(name).grad, parameter.grad, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(dict(ours.named_buffers()), dict(net.named_buffers()), rtol=1e-12, atol=0)
    (planned,) = planned_regions(ours, (4, 3, 20, 20))
    assert isinstance(planned, PlannedRegion)
    assert (planned.run.region.ends_at is not None) is ends


def test_a_view_that_is_changed_where_boxes_end_is_refused() -> None:
    """Boxes keep a view apart from the map: the map stayed as it was."""

    def compute(m: Any, x: Tensor) -> Tensor:
        y = m.conv(x)
        y[:, :2].mul_(2)
        return y

    with pytest.raises(ValueError, match=r"changes getitem in place, and with it conv, .* Write it without in-place"):
        streamed(Made(compute, conv=nn.Conv2d(3, 4, 3)), 8, (1, 3, 20, 20))


def test_autocast_keeps_no_weight_without_data() -> None:
    """The region is read without data under the pass's own autocast, which kept casts of the weights behind the region:
    their first gradients were FakeTensors, and SGD's momentum with them."""
    net = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2))
    plain, image = copy.deepcopy(net), torch.rand(2, 3, 16, 16)
    for compute in (plain, lambda x: in_boxes(net, 8)(net, x)[0]):
        with torch.autocast("cpu", torch.bfloat16):
            output = compute(image)
        output.float().square().sum().backward()
    for ours, theirs in zip(net.parameters(), plain.parameters(), strict=True):
        assert type(ours.grad) is Tensor
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=0.05, atol=0.02)


def test_sums_of_many_boxes_keep_their_digits() -> None:
    """Added up in bfloat16, means of 256 boxes, and the gradients of what is made of them, were a fifth too large."""
    net = Made(
        lambda m, x: (y := m.conv(x)) * m.gate(mean(y)),
        conv=nn.Conv2d(1, 1, 1, bias=False),
        gate=nn.Conv2d(1, 1, 1, bias=False),
    )
    nn.init.constant_(net.conv.weight, 1.5)
    nn.init.ones_(net.gate.weight)
    run = in_boxes(net, 8)
    with torch.autocast("cpu", torch.bfloat16):
        output = run(net, torch.ones(1, 1, 128, 128))[0].float().mean()
    output.backward()
    assert {len(part.places) for phase in run.planned.phases for part in phase.parts} == {256}
    found = torch.stack([output.detach(), net.conv.weight.grad.sum(), net.gate.weight.grad.sum()])
    torch.testing.assert_close(found, torch.tensor([2.25, 3.0, 2.25]), rtol=0.005, atol=0)


def halved(y: Tensor) -> Tensor:
    halves = mean(y).chunk(2, 1)
    return (y[:, :2] * halves[0]).amax((2, 3), keepdim=True) + halves[1]


@pytest.mark.parametrize(
    ("compute", "words"),
    [
        (halved, "chunk is several tensors, which getitem_2"),
        (lambda y: torch.cat(y.chunk(2, 1)[::-1], 1), "getitem is several tensors, which cat"),
        (lambda y: torch.stack(y.chunk(2, 1)).sum(0), "chunk is several tensors, which stack"),
    ],
)
def test_several_tensors_that_leave_together_are_refused(compute: Callable[[Tensor], Tensor], words: str) -> None:
    """A layer that takes several maps as one value ended in an AssertionError."""
    net = called(compute)
    with pytest.raises(ValueError, match=f"{words} takes outside the boxes: take them apart before"):
        in_boxes(net, 8)(net, torch.randn(1, 3, 20, 20))


def pooled() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1), nn.MaxPool2d(2))


def test_boxes_of_one_shape_share_a_program() -> None:
    model = pooled()
    run = in_boxes(model, 8)
    run(model, torch.randn(1, 3, 48, 48))
    part = run.planned.phases[0].parts[0]
    assert len(part.places) == 36
    assert len({id(part.program(*place)) for place in part.places}) == 9, "corners, edges and the inside"


def test_programs_that_were_let_go_of_are_compiled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(part_plan, "MOST_PROGRAMS", 2)
    assert streaming_error(pooled(), (1, 3, 48, 40), 8) <= 1e-12
