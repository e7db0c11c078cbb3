"""An operation that can be computed box by box: its rules on paper, and what computes a box of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

from parallel.space.rule import SAME, Rule
from parallel.streaming.patch import Patch

DIMS = (2, 3)
"""Rows and columns of what most operations take: (n, c, h, w)."""


class NotTileable(Exception):
    """An operation looks at the whole image, or cannot be shown not to; says why, and what to do about it."""


class Arguments:
    """What a node is called with, for one box.

    Args:
        model: has the modules that nodes call.
        patches: of the maps it takes, by name.
        resolve: value of any other node that it names.
        may_change: nobody else uses the memory of the map it takes.
        known: values without rows, by name of the step.
        template: nothing, in the type and on the device of the value.
        stored: the value, where it is at hand.

    Attributes:
        patch: of the only map.
    """

    patch: Patch

    def __init__(
        self,
        model: nn.Module,
        node: fx.Node,
        patches: Mapping[str, Patch],
        resolve: Callable[[fx.Node], Any],
        may_change: bool = False,
        known: Mapping[str, Any] = MappingProxyType({}),
        template: Tensor | None = None,
        stored: Tensor | None = None,
    ) -> None:
        self.patches = patches
        if len(patches) == 1:
            (self.patch,) = patches.values()
        self.stored = stored
        self.may_change = may_change
        self._model = model
        self._known = known
        self._template = template
        self._node = node
        self._resolve = resolve

    @property
    def template(self) -> Tensor:
        """Nothing, in the type and on the device of the node's value."""
        assert self._template is not None
        return self._template

    def prior(self, suffix: str) -> Any:
        """What the node's own step before it gave, for all boxes alike."""
        return self._known[self._node.name + suffix]

    def value(self, argument: Any) -> Any:
        """``argument`` of the node with values in place of nodes."""
        return fx.map_arg(argument, self._of)

    def _of(self, node: fx.Node) -> Any:
        patch = self.patches.get(node.name)
        return self._resolve(node) if patch is None else patch.tensor

    def run(self) -> Any:
        """Call what the node calls."""
        node = self._node
        args, kwargs = self.value(node.args), self.value(node.kwargs)
        if node.op == "call_module":
            return self._model.get_submodule(str(node.target))(*args, **kwargs)
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        assert callable(node.target)
        return node.target(*args, **kwargs)


Compute = Callable[[Arguments], Any]


@dataclass(frozen=True)
class Operation:
    """How a node is computed box by box.

    Attributes:
        compute: the box from its patches.
        rules: (rows, columns).
        dims: of rows and columns in its value.
        sums: it adds up to a sum over all boxes.
        merge: what two boxes give, put together; None adds them.
        again: the value a second time, for its gradients alone: it is at hand, or nobody looks at it. None: as the
            first time.
        of_sums: its value is made of the sums in ``first`` alone, and has no rows.
        shares: its value may lie in the memory of what it takes.
        first: what has to be known before.
        fresh: the gradient that it gives a map lies in memory that nobody else has.
        flops_each: of each number it gives.
        convolution: of one padded by zeros, (weight, bias, groups).
        norm: of a batch norm by the statistics of the whole image, what it is made of.
        drawn: what the map is multiplied by, drawn for the whole of it.
    """

    compute: Compute
    rules: tuple[Rule, Rule] = (SAME, SAME)
    dims: tuple[int, int] = DIMS
    sums: bool = False
    merge: Callable[[Tensor, Tensor], Tensor] | None = None
    again: Compute | None = None
    of_sums: bool = False
    shares: bool = False
    first: tuple[Prior, ...] = ()
    fresh: bool = False
    flops_each: float = 40.0
    convolution: Callable[[Arguments], tuple[Tensor, Tensor | None, int]] | None = None
    norm: ChannelNorm | None = None
    drawn: Compute | None = None


@dataclass(frozen=True)
class ChannelNorm:
    """Batch norm over all tiles, rows and columns.

    Attributes:
        affine: scale and shift.
        then: what is done with its value.
        count: px of all tiles.
    """

    affine: Callable[[Arguments], tuple[Tensor | None, Tensor | None]]
    eps: float
    then: Callable[[Tensor], Tensor]
    count: int


@dataclass(frozen=True)
class Prior:
    """A step of a node before its own.

    Attributes:
        suffix: of its name, behind the node's.
        once: it takes no map, and runs in the forward pass alone; else it is a sum over all boxes.
    """

    suffix: str
    operation: Operation
    once: bool = False


class Reading:
    """What is known of a region while its nodes are read.

    Args:
        model: has the modules that nodes call.
        once: every node is computed once, and may draw for the whole map.

    Attributes:
        dims: of rows and columns, by name of each map.
        sides: rows and columns of each map.
        aliases: name of a map -> the map whose memory it may share.
        values: of nodes, run on tensors without data.
    """

    def __init__(self, model: nn.Module, once: bool = False) -> None:
        self.model, self.once = model, once
        self.dims: dict[str, tuple[int, int]] = {}
        self.sides: dict[str, tuple[int, int]] = {}
        self.aliases: dict[str, fx.Node] = {}
        self.values: dict[str, Any] = {}

    def maps(self, node: fx.Node) -> list[fx.Node]:
        """The maps that a node takes."""
        return [argument for argument in node.all_input_nodes if argument.name in self.dims]

    def value(self, argument: Any) -> Any:
        """An argument of a node with values in place of nodes."""
        return fx.map_arg(argument, self.of)

    def of(self, node: fx.Node) -> Any:
        """The value of a node; found out when it is first asked for."""
        if node.name not in self.values:
            if node.op == "get_attr":
                self.values[node.name] = attribute(self.model, node)
            elif node.op == "call_module" and isinstance(self.model.get_submodule(str(node.target)), _BatchNorm):
                self.values[node.name] = torch.empty_like(self.of(node.all_input_nodes[0]))  # run, it would count
            else:
                value = Arguments(self.model, node, {}, self.of).run()
                if self._is_group_norm(node) and value.device.type == "cpu":
                    value = torch.empty_like(self.of(node.all_input_nodes[0]))  # without data torch says other strides
                self.values[node.name] = value
        return self.values[node.name]

    def _is_group_norm(self, node: fx.Node) -> bool:
        if node.op == "call_module":
            return isinstance(self.model.get_submodule(str(node.target)), nn.GroupNorm)
        return node.target is F.group_norm

    def shape(self, node: fx.Node) -> tuple[int, ...]:
        value = self.of(node)
        assert isinstance(value, Tensor)
        return tuple(value.shape)


def attribute(model: nn.Module, node: fx.Node) -> Any:
    """The parameter, buffer or constant that a node names."""
    owner, _, name = str(node.target).rpartition(".")
    return getattr(model.get_submodule(owner), name)
