"""Kernels that the product calls by hand get arguments of the form that autograd's own formulas pass.

A CPU takes more than a GPU does: a kernel that runs here may stop there in its first backward pass.
"""

import ast
import contextlib
import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from parallel.comm.thread_comm import run_on_threads
from parallel.space.team import TeamGrid
from parallel.team.team_stage import TeamStage
from tests.contracts.kernel_calls import KERNELS, PRODUCT, RecordedCalls, form_faults
from tests.helpers import team_error as team_errors
from tests.helpers.streaming import in_boxes

ROOMS = ("app", "models", "parallel", "pipelines")
SHAPE = (2, 4, 20, 18)
TYPES = ("float32", "float64", "autocast")


BY_HAND = ("torch.ops.aten.", "torch.native_", "torch.batch_norm", "torch._C._nn.", "torch._VF")


def hand_made_calls():
    """Return (path, function, kernel) of the calls of ATen's operations in the product."""
    found = set()
    for path in (path for room in ROOMS for path in sorted((PRODUCT / room).rglob("*.py"))):
        text = path.read_text()
        if not any(name in text for name in BY_HAND):
            continue
        for function in (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)):
            for name in (ast.unparse(node) for node in ast.walk(function) if isinstance(node, ast.Attribute)):
                if name.startswith(BY_HAND):
                    kernel = name.removeprefix("torch.ops.aten.").removeprefix("torch.").removesuffix(".default")
                    found.add((str(path.relative_to(PRODUCT)), function.name, kernel))
    return found


@contextlib.contextmanager
def precision(kind):
    with torch.autocast("cpu", torch.bfloat16) if kind == "autocast" else contextlib.nullcontext():
        yield


def dtype_of(kind):
    return torch.float64 if kind == "float64" else torch.float32


def tiles(kind, layout, shape=SHAPE):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype_of(kind))
    return x.contiguous(memory_format=layout).requires_grad_()


@functools.cache
def autograd_calls(kind):
    """Calls that functional batch norm and convolutions make, forward and backward."""
    calls = []
    weight = torch.ones(4, dtype=dtype_of(kind), requires_grad=True)
    mean, variance = torch.zeros_like(weight).detach(), torch.ones_like(weight).detach()
    filters = [torch.randn(4, 4 // groups, 3, 3, dtype=dtype_of(kind), requires_grad=True) for groups in (1, 2, 4)]
    upward = torch.randn(4, 4, 2, 2, dtype=dtype_of(kind), requires_grad=True)
    with RecordedCalls(calls):
        for layout in (torch.contiguous_format, torch.channels_last):
            for affine in (None, weight):
                for training in (False, True):
                    for x in (
                        (tiles(kind, layout), tiles("autocast", layout).bfloat16())
                        if kind == "autocast"
                        else (tiles(kind, layout),)
                    ):
                        y = F.batch_norm(x, mean, variance, affine, affine, training)
                        y.sum().backward()
                        torch.batch_norm_update_stats(x.detach(), None, None, 0.0)
                        torch.batch_norm_update_stats(x.detach(), mean, variance, 0.0)
                maps = tiles(kind, layout).detach()
                torch.nn.grad.conv2d_input(maps.shape, filters[0].detach(), maps, padding=1)  # without bias_sizes
                torch.nn.grad.conv2d_weight(maps, filters[0].shape, maps, padding=1)
                with precision(kind):
                    for groups, filter in zip((1, 2, 4), filters, strict=True):
                        F.conv2d(tiles(kind, layout), filter, affine, 1, 1, 1, groups).float().square().sum().backward()
                    F.conv_transpose2d(tiles(kind, layout), upward, affine, 2).float().square().sum().backward()
    return calls


class Layers(nn.Module):
    """Convolutions and batch norms of every form, with a norm whose parameters are frozen."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(4, 4, 3, padding=1),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.Conv2d(4, 4, 3, padding=1, groups=4, bias=False),
            nn.BatchNorm2d(4, affine=False),
            nn.Conv2d(4, 4, 3, stride=2, groups=2),
            nn.BatchNorm2d(4),
            nn.Conv2d(4, 4, 1),
        )
        self.body[6].weight.requires_grad_(False)

    def forward(self, x):
        return self.body(x)


@functools.cache
def streaming_calls(kind, layout):
    calls = []
    module = Layers().to(dtype_of(kind)).to(memory_format=layout)
    run = in_boxes(module, 8)
    with RecordedCalls(calls), precision(kind):
        run(module, tiles(kind, layout))[0].float().square().sum().backward()
    return calls


@functools.cache
def team_calls(kind, layout):
    calls = []

    def recorded(world, function, arguments, **more):
        def member(communicator, argument):
            with RecordedCalls(calls):
                return function(communicator, argument)

        return run_on_threads(world, member, arguments, **more)

    forward = TeamStage.forward

    def in_precision(stage, *values):
        with precision(kind):
            return forward(stage, *values)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TeamStage, "forward", in_precision)
        patch.setattr(team_errors, "run_on_threads", recorded)
        module = Layers().to(dtype_of(kind)).to(memory_format=layout)
        team_errors.team_error(module, SHAPE, TeamGrid(2, 1))
    return calls


RUNS = {"streaming": streaming_calls, "team": team_calls}


@pytest.mark.pairs
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("run", RUNS)
def test_arguments_have_the_form_that_autograd_passes(run, kind, layout):
    calls = RUNS[run](kind, layout)
    assert {call.kernel for call in calls if call.site}
    assert form_faults(calls, autograd_calls(kind)) == []


def test_every_call_in_the_product_is_covered():
    static = hand_made_calls()
    assert {kernel for _, _, kernel in static} == set(KERNELS)
    calls = [
        call
        for run in RUNS.values()
        for layout in (torch.contiguous_format, torch.channels_last)
        for call in run("float32", layout)
    ]
    recorded = {(*call.site, call.kernel) for call in calls if call.site}
    assert static - recorded == set()
