"""Costs of the layers of a model, measured on the device: each node of its graph alone, forward and backward.

Takes what ``trace`` gave and the shape of a microbatch; gives ``Costs``. A node runs on copies of the values that
earlier nodes gave, without their history, and a value is let go after its last use. As in a step, what goes in has just
been written, parameters and what was kept for backward come from memory, and the code is in the caches: each pass runs
on other tensors first. At most one layer's memory for training, twice, is needed besides the values still to be used,
so that models can be measured whose training does not fit.
"""

from __future__ import annotations

import copy
import functools
import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils._pytree import tree_leaves, tree_map

from parallel.cost.stage_cost import Costs, LayerCost
from parallel.profile.op_timing import LEAST_S, Setting, empty_backward, empty_backward_s, now, sweep
from parallel.trace.trace import Traced
from parallel.trace.without_data import preserve_module_state


class Runs(NamedTuple):
    """The seconds of every run of a layer: forward, backward, and the half of backward for what went in."""

    forward: list[float]
    backward: list[float]
    backward_input: list[float]


def measure(traced: Traced, shape: tuple[int, ...], device: torch.device, *, repeats: int = 3) -> Costs:
    """Return the seconds of every layer. Weights, buffers, modes and random state stay as they are.

    Args:
        traced: a model whose weights are on ``device``, in channels_last.
        shape: (n, c, h, w) of a microbatch.
        repeats: runs of each pass that count, after one that does not; their median is taken.

    Raises:
        ValueError: the weights have no values.
    """
    if any(parameter.is_meta for parameter in traced.model.parameters()):
        raise ValueError(
            "only layers that have weights can be measured; got a model on the meta device. Build it on "
            f"{device}, or estimate its layers from a calibration"
        )
    images = torch.rand(shape, device=device, generator=torch.Generator(device).manual_seed(0))
    with (
        preserve_module_state(traced.model, parameters=True),
        preserve_module_state(traced.training),
        torch.random.fork_rng(devices=[device] if device.type == "cuda" else []),
        torch.enable_grad(),
    ):
        traced.training.train()
        for path, (mode, _) in traced.modes.items():
            traced.model.get_submodule(path).training = mode
        interpreter = _Interpreter(traced, device, repeats)
        interpreter.run(images.contiguous(memory_format=torch.channels_last))
    readings = [interpreter.runs[layer.name] for layer in traced.graph.layers]
    layers = tuple(LayerCost(*map(statistics.median, runs)) for runs in readings)
    return Costs(layers, f"measured at {shape[-1]} px", _spread(readings))


def _spread(readings: Sequence[Runs]) -> float | None:
    """Return how far the middle run of a layer is from its fastest, in the middle over the layers."""
    sums = [[sum(run) for run in zip(runs.forward, runs.backward, strict=True)] for runs in readings]
    spreads = [float(np.median(runs)) / min(runs) - 1 for runs in sums if min(runs) > 0]
    return float(np.median(spreads)) if spreads else None


class _Work(NamedTuple):
    """What a node computes from arguments and keywords, and the parameters that get gradients."""

    compute: Callable[[Any, Any], Any]
    parameters: list[nn.Parameter]


def _trained(module: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


class _Interpreter(fx.Interpreter):
    def __init__(self, traced: Traced, device: torch.device, repeats: int) -> None:
        super().__init__(traced.training)
        self.extra_traceback = False
        self.runs: dict[str, Runs] = {}
        self._differentiable = {layer.name for layer in traced.graph.layers if layer.differentiable}
        self._setting = Setting(device)
        self._repeats = repeats

    def run_node(self, n: fx.Node) -> Any:
        runs = self.runs[n.name] = Runs([], [], [])
        if n.op in ("placeholder", "get_attr", "output"):
            for seconds in runs:
                seconds.append(0.0)
            return super().run_node(n)
        own = _Work(functools.partial(getattr(self, n.op), n.target), [])
        other = own
        if n.op == "call_module" and isinstance(module := self.fetch_attr(str(n.target)), nn.Module):
            own = _Work(own.compute, _trained(module))
            twin = copy.deepcopy(module)  # with weights of its own
            other = _Work(lambda args, kwargs: twin(*args, **kwargs), _trained(twin))
        value: Any = None
        for _ in range(self._repeats + 1):
            value = None  # the next run may use its memory
            value = self._once(n, own, other, runs)
        for seconds in runs:
            del seconds[0]
        value = tree_map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, value)
        sums = self._sums(n, value)
        for seconds in (runs.backward, runs.backward_input):
            seconds[:] = [backward_s + sums for backward_s in seconds]
        return value

    def _once(self, n: fx.Node, own: _Work, other: _Work, runs: Runs) -> Any:
        """Time the passes of ``own``; right before each, ``other`` brings its code into the caches."""
        other_args, other_edges = self._given(n)
        sweep(self._setting)
        other_value = other.compute(*other_args)
        args, edges = self._given(n)
        start = now(self._setting)
        value = own.compute(*args)
        runs.forward.append(now(self._setting) - start)
        gradients = [torch.ones_like(output) for output in _differentiable_leaves(value)]

        def differentiate(value: Any, wanted: list[Any], *, retain: bool) -> None:
            outputs = _differentiable_leaves(value)
            torch.autograd.grad(outputs, wanted, gradients, retain_graph=retain, allow_unused=True)

        def backward_s(wanted: list[Any], of_other: list[Any], *, retain: bool = False) -> float:
            if not gradients or not wanted:
                return 0.0
            sweep(self._setting)
            differentiate(other_value, of_other, retain=retain)
            for gradient in gradients:
                gradient.fill_(1)
            empty_backward(self._setting.device)()
            start = now(self._setting)
            differentiate(value, wanted, retain=retain)
            return max(now(self._setting) - start - empty_backward_s(self._setting), LEAST_S)

        both, both_of_other = [*edges, *own.parameters], [*other_edges, *other.parameters]
        runs.backward.append(backward_s(both, both_of_other, retain=bool(own.parameters)))
        runs.backward_input.append(backward_s(edges, other_edges) if own.parameters else runs.backward[-1])
        return value

    def _given(self, n: fx.Node) -> tuple[tuple[Any, Any], list[Any]]:
        """Return arguments of a node, and the edges of those that have gradients.

        Copies, since the operation may change what it is given, which must not be a leaf then.
        """
        copies = {
            node: tree_map(_copy, self.env[node]) for node in n.all_input_nodes if node.name in self._differentiable
        }
        arguments = fx.map_arg((n.args, n.kwargs), lambda node: copies.get(node, self.env[node]))
        edges = [get_gradient_edge(leaf) for value in copies.values() for leaf in _differentiable_leaves(value)]
        return arguments, edges

    def _sums(self, n: fx.Node, value: Any) -> float:
        """Return the seconds to add up the gradients of ``value``, where several layers use it."""
        uses = sum(user.name in self._differentiable for user in n.users)
        if n.name not in self._differentiable or uses < 2:
            return 0.0
        seconds = []
        for _ in range(self._repeats + 1):
            start = now(self._setting)
            tree_map(lambda leaf: leaf + leaf if isinstance(leaf, Tensor) else leaf, value)
            seconds.append(now(self._setting) - start)
        return (uses - 1) * statistics.median(seconds)


def _copy(leaf: Any) -> Any:
    """Return a copy with a history, as in training."""
    if not isinstance(leaf, Tensor) or not (leaf.is_floating_point() or leaf.is_complex()):
        return leaf
    return leaf.detach().requires_grad_().clone()


def _differentiable_leaves(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor) and leaf.requires_grad]
