"""A module run in boxes beside itself run whole: outputs, and gradients of its parameters and of what enters it."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, fx, nn

from parallel.streaming.region_run import RegionRun
from parallel.streaming.streamed_module import StreamedRun


class _Tracer(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return super().is_leaf_module(m, module_qualified_name) or isinstance(m, (nn.BatchNorm2d, nn.Conv2d))


def in_boxes(module: nn.Module, box: int) -> StreamedRun:
    """``module``, in the mode it is in, traced by torch alone."""
    graph = _Tracer().trace(module)
    (name,) = (node.name for node in graph.nodes if node.op == "placeholder")
    return StreamedRun(list(graph.nodes), (name,), ("output",), box)


def planned(run: StreamedRun) -> RegionRun:
    """What was planned for the only shape that was run."""
    (plan,) = run._plans.values()
    return plan.run


def streaming_error(module: nn.Module, shape: tuple[int, ...], box: int, dtype: torch.dtype = torch.float64) -> float:
    """Largest difference of outputs and gradients, relative to the largest value of each tensor, or of the gradients
    where that one is small."""
    plain = copy.deepcopy(module).to(dtype)
    ours = copy.deepcopy(plain)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    results = []
    run = in_boxes(ours, box)
    for compute, net in ((plain, plain), (lambda t: run(ours, t)[0], ours)):
        torch.manual_seed(7)
        image = x.clone().requires_grad_()
        output = compute(image)
        weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64).to(dtype)
        (output * weights).sum().backward()
        results.append([output.detach(), image.grad, *(p.grad for p in net.parameters())])
    return max(_error(theirs, mine) for theirs, mine in zip(*results, strict=True))


def _error(expected: Tensor | None, found: Tensor | None) -> float:
    if expected is None or found is None:
        return 0.0 if expected is found else float("inf")
    assert expected.shape == found.shape
    size = float(expected.abs().max())
    difference = float((expected - found).abs().max())
    return difference / size if size > 1e-9 else difference
