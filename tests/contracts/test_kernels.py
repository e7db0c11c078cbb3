"""Kernels that the product calls by hand get arguments of the form that autograd's own formulas pass.

A CPU takes more than a GPU does: a kernel that runs here may stop there in its first backward pass.
"""

from __future__ import annotations

import ast
import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parallel.comm.thread_comm import run_on_threads
from parallel.space.team import Grid
from parallel.team.team_stage import TeamStage
from tests.contracts.kernel_calls import KERNELS, PRODUCT, Call, RecordedCalls, cuda_faults, form_faults
from tests.helpers import team_error as team_errors
from tests.helpers.streaming import in_boxes

ROOMS = ("app", "models", "parallel", "pipelines")
SHAPE = (2, 4, 20, 18)
TYPES = ("float32", "float64", "autocast")


BY_HAND = ("torch.ops.aten.", "torch.native_", "torch.batch_norm", "torch._C._nn.", "torch._VF")


def hand_made_calls() -> set[tuple[str, str, str]]:
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
def precision(kind: str) -> Iterator[None]:
    with torch.autocast("cpu", torch.bfloat16) if kind == "autocast" else contextlib.nullcontext():
        yield


def dtype_of(kind: str) -> torch.dtype:
    return torch.float64 if kind == "float64" else torch.float32


def tiles(kind: str, layout: torch.memory_format, shape: tuple[int, ...] = SHAPE) -> Tensor:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype_of(kind))
    return x.contiguous(memory_format=layout).requires_grad_()


@functools.cache
def autograd_calls(kind: str) -> list[Call]:
    """Calls that functional batch norm and convolutions make, forward and backward."""
    calls: list[Call] = []
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

    def __init__(self) -> None:
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

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.body(x)
        return y


@functools.cache
def streaming_calls(kind: str, layout: torch.memory_format) -> list[Call]:
    calls: list[Call] = []
    module = Layers().to(dtype_of(kind)).to(memory_format=layout)
    run = in_boxes(module, 8)
    with RecordedCalls(calls), precision(kind):
        run(module, tiles(kind, layout))[0].float().square().sum().backward()
    return calls


@functools.cache
def team_calls(kind: str, layout: torch.memory_format) -> list[Call]:
    calls: list[Call] = []

    def recorded(world: int, function: Callable[..., Any], arguments: Any, **more: Any) -> Any:
        def member(communicator: Any, argument: Any) -> Any:
            with RecordedCalls(calls):
                return function(communicator, argument)

        return run_on_threads(world, member, arguments, **more)

    forward = TeamStage.forward

    def in_precision(stage: TeamStage, *values: Any) -> Any:
        with precision(kind):
            return forward(stage, *values)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TeamStage, "forward", in_precision)
        patch.setattr(team_errors, "run_on_threads", recorded)
        module = Layers().to(dtype_of(kind)).to(memory_format=layout)
        team_errors.team_error(module, SHAPE, Grid(2, 1))
    return calls


RUNS = {"streaming": streaming_calls, "team": team_calls}


@pytest.mark.pairs
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("run", RUNS)
def test_arguments_have_the_form_that_autograd_passes(run: str, kind: str, layout: torch.memory_format) -> None:
    calls = RUNS[run](kind, layout)
    assert {call.kernel for call in calls if call.site}
    assert form_faults(calls, autograd_calls(kind)) == []
    assert [fault for call in calls for fault in cuda_faults(call)] == []


def test_every_call_in_the_product_is_covered() -> None:
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


def call_of(kernel: str, **changed: Any) -> Call:
    """A call that CUDA takes, but for what is ``changed``; without data."""
    maps, vector = torch.empty(2, 4, 8, 8, device="meta"), torch.empty(4, device="meta")
    norm = {"input": maps, "weight": vector, "running_mean": vector, "running_var": vector, "eps": 1e-5}
    geometry = {"stride": [1, 1], "padding": [0, 0], "dilation": [1, 1], "output_padding": [0, 0], "groups": 4}
    filters = torch.empty(4, 1, 1, 1, device="meta")
    arguments: dict[str, Any] = {
        "native_batch_norm": norm | {"bias": vector, "training": False},
        "native_batch_norm_backward": norm
        | {"grad_out": maps, "save_mean": vector[:0], "save_invstd": vector[:0], "train": False}
        | {"output_mask": [True] * 3},
        "batch_norm_update_stats": {"input": maps, "running_mean": None, "running_var": None, "momentum": 0.1},
        "convolution_backward": geometry
        | {"grad_output": maps, "input": maps, "weight": filters, "bias_sizes": [4], "output_mask": [True] * 3},
    }[kernel]
    return Call(kernel, None, arguments | changed)


HALF, WIDE = torch.empty(4, dtype=torch.bfloat16, device="meta"), torch.empty(1, 4, 2**15, 2**15, device="meta")
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("native_batch_norm_backward", {"save_mean": None, "save_invstd": None}, "defined save_mean"),
    ("native_batch_norm_backward", {"train": True}, "values in save_mean"),
    ("native_batch_norm_backward", {"running_mean": HALF, "running_var": HALF}, "one type"),
    (
        "native_batch_norm_backward",
        {"save_mean": HALF[:0], "save_invstd": HALF[:0]},
        "save_mean and save_invstd of one",
    ),
    ("native_batch_norm_backward", {"grad_out": torch.empty(2, 4, 8, 8).bfloat16().to("meta")}, "gradient"),
    ("native_batch_norm_backward", {"weight": None}, "a weight"),
    ("native_batch_norm", {"running_mean": None, "running_var": None}, "running statistics in evaluation"),
    ("native_batch_norm", {"weight": HALF, "bias": HALF, "running_mean": HALF, "running_var": HALF}, "parameters of"),
    ("native_batch_norm", {"bias": torch.empty(4)}, "one device"),
    ("batch_norm_update_stats", {"running_mean": HALF}, "both running statistics"),
    ("convolution_backward", {"weight": torch.empty(4, 1, 1, 1).double().to("meta")}, "one type"),
    ("convolution_backward", {"input": WIDE}, "32-bit"),
    ("convolution_backward", {"bias_sizes": None}, "bias_sizes"),
    ("convolution_backward", {"stride": [1]}, "geometry"),
]


@pytest.mark.parametrize("kernel", KERNELS)
def test_cuda_takes_a_right_call(kernel: str) -> None:
    assert cuda_faults(call_of(kernel)) == []


@pytest.mark.parametrize(
    ("kernel", "changed", "keyword"), REFUSED, ids=lambda value: ",".join(value) if isinstance(value, dict) else value
)
def test_cuda_refuses(kernel: str, changed: dict[str, Any], keyword: str) -> None:
    assert any(keyword in fault for fault in cuda_faults(call_of(kernel, **changed)))
