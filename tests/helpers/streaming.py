"""A module run in boxes beside itself run whole: outputs, and gradients of its parameters and of what enters it."""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
from torch import Tensor, fx, nn

from parallel.comm.thread_comm import LocalCommunicator
from parallel.space.team import TeamGrid
from parallel.team.boxed_nodes import BoxedNodes, PlannedRegion
from parallel.team.region_run import RegionRun
from parallel.team.team_comm import ForwardContext, TeamComm
from parallel.team.team_plan import BoxedParts, plan_alone
from tests.helpers.plain_step import relative_errors

CPU = torch.device("cpu")


class _Tracer(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return super().is_leaf_module(m, module_qualified_name) or isinstance(m, (nn.BatchNorm2d, nn.Conv2d))


class InBoxes:
    """Runs ``nodes`` in the values of the module that it is called with."""

    def __init__(self, nodes: BoxedNodes) -> None:
        self.nodes, self.plan = nodes, functools.lru_cache(plan_alone)
        self.comm = TeamComm(LocalCommunicator())

    def __call__(self, module: nn.Module, x: Tensor) -> Any:
        self.shape = tuple(x.shape), module.training
        return self.nodes.run(module, ForwardContext(self.plan(*self.shape), self.comm, x.device), (x,))

    @property
    def planned(self) -> RegionRun:
        """Return what was planned for the shape that was run."""
        (region,) = (value for value in self.plan(*self.shape).compiled.values() if isinstance(value, PlannedRegion))
        return region.run


def in_boxes(module: nn.Module, box: int, device: torch.device = CPU) -> InBoxes:
    """Return ``module``, in the mode it is in, traced by torch alone."""
    graph = _Tracer().trace(module)
    (name,) = (node.name for node in graph.nodes if node.op == "placeholder")
    comm = TeamComm(LocalCommunicator())
    nodes = BoxedNodes(list(graph.nodes), (name,), ("output",), (), BoxedParts(box), TeamGrid(), comm, device)
    return InBoxes(nodes)


def end_of_boxes(module: nn.Module, box: int = 8) -> tuple[str, str]:
    """Return the layer that is not computed in boxes, and why; it and what follows are computed whole."""
    plain, run, images = copy.deepcopy(module), in_boxes(module, box), torch.randn(1, 3, 18, 18)
    torch.manual_seed(7)
    expected = plain(images)
    torch.manual_seed(7)
    torch.testing.assert_close(run(module, images)[0], expected)
    ends = run.planned.region.ends_at
    assert ends is not None
    return ends


def streaming_error(module: nn.Module, shape: tuple[int, ...], box: int, dtype: torch.dtype = torch.float64) -> float:
    """Largest relative error of outputs and gradients."""
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
    expected, found = (dict(enumerate(values)) for values in results)
    return max(relative_errors(expected, found).values())
