"""Operation that can be computed box by box: the rules of its rows and columns, and the computation of a box."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from torch import Tensor, fx, nn

from parallel.space.rule import SAME, Rule
from parallel.streaming.patch import Patch

DIMS = (2, 3)
"""Rows and columns of what most operations take: (n, c, h, w)."""


class NotTileable(Exception):
    """Reason why an operation cannot be computed box by box, and what to do about it."""


class Arguments:
    """Arguments of a node for one box.

    Args:
        model: has the modules that nodes call.
        patches: boxes of the maps that it takes, by name.
        resolve: value of any other node that it names.
        may_change: the memory of its map has no other user.
        known: values without rows, by name of the step.
        template: tensor in the type and on the device of the node's value.
        stored: the value, where it was computed before.

    Attributes:
        patch: box of the only map.
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
        self.stored, self.may_change, self.template = stored, may_change, template
        self._model, self._known = model, known
        self._node, self._resolve = node, resolve

    def prior(self, suffix: str) -> Any:
        """Return the value of a step of the node before its own, for all boxes alike."""
        return self._known[self._node.name + suffix]

    def value(self, argument: Any) -> Any:
        """Return ``argument`` of the node with values in place of nodes."""
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
    """Rules and computation of a node, box by box.

    Attributes:
        compute: gives a box from its patches.
        rules: (rows, columns).
        dims: dims of rows and columns in its value.
        sums: its boxes add up to one value without rows.
        merge: combines the sums of all boxes; None adds them.
        again: recomputes a box for its gradients alone, whose value is at hand or has no reader; None: ``compute``.
        of_sums: its value is made of the sums in ``first`` alone, and has no rows.
        shares: its value may lie in the memory of its map.
        first: steps of the node before this one.
        fresh: the gradient that it gives a map lies in memory of its own.
        flops_each: flops of each number that it gives.
        convolution: (gives weight and bias, groups, numbers of the weight) of a convolution padded by zeros.
        norm: constants of a batch norm by the statistics of the whole image.
        drawn: draws the factors of the whole map.
        plain: gives a box, or what it adds to a sum, from the tensor of the only map alone.
    """

    compute: Compute
    rules: tuple[Rule, Rule] = (SAME, SAME)
    dims: tuple[int, int] = DIMS
    sums: bool = False
    merge: Callable[[Sequence[Tensor]], Tensor] | None = None
    again: Compute | None = None
    of_sums: bool = False
    shares: bool = False
    first: tuple[Prior, ...] = ()
    fresh: bool = False
    flops_each: float = 40.0
    convolution: tuple[Callable[[Arguments], tuple[Tensor, Tensor | None]], int, int] | None = None
    norm: ChannelNorm | None = None
    drawn: Compute | None = None
    plain: Callable[[Tensor], Any] | None = None


@dataclass(frozen=True)
class ChannelNorm:
    """Constants of a batch norm over all tiles, rows and columns.

    Attributes:
        affine: gives scale and shift, as ``weight`` and ``bias`` of its module.
        running: gives running mean and variance, as ``running_mean`` and ``running_var`` of its module.
        update: changes them by the moments of all boxes; None: it has none.
        then: activation behind it; None: nothing.
        count: px of all tiles.
    """

    affine: Callable[[Arguments], tuple[Tensor | None, Tensor | None]]
    running: Callable[[Arguments], tuple[Tensor, Tensor]]
    update: Callable[[Tensor, Tensor, Tensor], None] | None
    eps: float
    then: Callable[[Tensor], Tensor] | None
    count: int


@dataclass(frozen=True)
class Prior:
    """Step of a node before its own.

    Attributes:
        suffix: part of its name behind the node's.
        once: it takes no map, and runs in the forward pass alone; else it is a sum over all boxes.
    """

    suffix: str
    operation: Operation
    once: bool = False


def attribute(model: nn.Module, node: fx.Node) -> Any:
    """The parameter, buffer or constant that a node names."""
    owner, _, name = str(node.target).rpartition(".")
    return getattr(model.get_submodule(owner), name)


def parameters_of(model: nn.Module, nodes: Iterable[fx.Node]) -> list[nn.Parameter]:
    """Return the parameters that ``nodes`` compute with, each once."""
    found: dict[nn.Parameter, None] = {}
    for node in dict.fromkeys(nodes):
        if node.op == "call_module":
            found.update(dict.fromkeys(model.get_submodule(str(node.target)).parameters()))
        read = (attribute(model, argument) for argument in node.all_input_nodes if argument.op == "get_attr")
        found.update(dict.fromkeys(value for value in read if isinstance(value, nn.Parameter)))
    return list(found)


def module_of(model: nn.Module, node: fx.Node) -> nn.Module | None:
    """Return the module that a node calls, if it calls one."""
    return model.get_submodule(str(node.target)) if node.op == "call_module" else None
