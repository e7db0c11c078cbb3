"""Nodes of a traced model while a region is read: their values without data, and the numbers that they are given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.batchnorm import _BatchNorm

from parallel.streaming.operation import DIMS, Arguments, NotTileable, Operation, attribute, module_of
from parallel.trace.op_recorder import storage_of, tensors_of


class Reading:
    """Values of nodes on tensors without data, filled while a region is read.

    Args:
        model: has the modules that nodes call.
        once: every node is computed once, and may draw for the whole map.

    Attributes:
        dims: dims of rows and columns, by name of each map.
        sides: rows and columns of each map.
        aliases: name of a map -> the map whose memory it may share.
    """

    def __init__(self, model: nn.Module, once: bool = False) -> None:
        self.model, self.once = model, once
        self.dims: dict[str, tuple[int, int]] = {}
        self.sides: dict[str, tuple[int, int]] = {}
        self.aliases: dict[str, fx.Node] = {}
        self.values: dict[str, Any] = {}

    def maps(self, node: fx.Node) -> list[fx.Node]:
        """Return the maps that a node takes."""
        return [argument for argument in node.all_input_nodes if argument.name in self.dims]

    def value(self, argument: Any) -> Any:
        """Return an argument of a node with values in place of nodes."""
        return fx.map_arg(argument, self.of)

    def of(self, node: fx.Node) -> Any:
        """Return the value of a node, computed at its first use."""
        if node.name not in self.values:
            module = module_of(self.model, node)
            if node.op == "get_attr":
                value = attribute(self.model, node)
            elif isinstance(module, _BatchNorm):
                value = torch.empty_like(self.of(node.all_input_nodes[0]))  # run, it would count
            else:
                value = Arguments(self.model, node, {}, self.of).run()
                if (isinstance(module, nn.GroupNorm) or node.target is F.group_norm) and value.device.type == "cpu":
                    value = torch.empty_like(self.of(node.all_input_nodes[0]))  # without data torch says other strides
            self.values[node.name] = value
        return self.values[node.name]

    def storages(self, name: str) -> set[StorageWeakRef]:
        """Return the memory of a value that is known."""
        return {storage_of(tensor) for tensor in tensors_of(self.values.get(name))}

    def shape(self, node: fx.Node) -> tuple[int, ...]:
        """Return the shape of the value of a node. Raises NotTileable where it is several maps."""
        value = self.of(node)
        if not isinstance(value, Tensor):
            raise NotTileable("takes several maps as one value")
        return tuple(value.shape)


class Layer:
    """Node that takes maps, with its numbers: attributes of its module, or arguments of its call.

    Args:
        names: arguments of a call, in order.

    Attributes:
        module: None where the node calls a function or method.
        maps: maps that it takes.
        arguments: nodes and numbers of a call, by name.
    """

    def __init__(self, reading: Reading, node: fx.Node, names: tuple[str, ...] = ()) -> None:
        self.reading, self.node, self.maps = reading, node, reading.maps(node)
        self.module: Any = module_of(reading.model, node)
        named = {"dim" if name == "axis" else name: value for name, value in node.kwargs.items()}  # torch takes both
        self.arguments: dict[str, Any] = dict(zip(names, node.args, strict=False)) | named

    @property
    def source(self) -> fx.Node:
        """Return the only map."""
        if len(self.maps) > 1:
            raise NotTileable("takes several maps where boxes know one")
        return self.maps[0]

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the only map."""
        return self.reading.shape(self.source)

    @property
    def dims(self) -> tuple[int, int]:
        """Return the dims of rows and columns of the first map."""
        return self.reading.dims[self.maps[0].name]

    @property
    def sides(self) -> tuple[int, int]:
        """Return the rows and columns of the first map."""
        return self.reading.sides[self.maps[0].name]

    def get(self, name: str, default: Any = None) -> Any:
        """Return a number of the layer."""
        if self.module is not None:
            return getattr(self.module, name, default)
        return self.reading.value(self.arguments[name]) if name in self.arguments else default

    def operands(self, first: str, second: str) -> Callable[[Arguments], tuple[Any, Any]]:
        """Return arguments of a box -> two tensors of the layer."""
        if (module := self.module) is not None:
            return lambda _: (getattr(module, first), getattr(module, second))
        nodes = self.arguments.get(first), self.arguments.get(second)
        return lambda given: given.value(nodes)

    def refuse_turned(self) -> None:
        """Refuse a map whose rows and columns are other than the last two of four dims."""
        value = self.reading.of(self.source)
        if not isinstance(value, Tensor) or value.dim() != 4 or self.dims != DIMS:
            raise NotTileable("takes rows and columns as other dims than the last two of four")

    def refuse_other_sizes(self) -> None:
        """Refuse maps that differ in their rows and columns from the first."""
        forms = {(len(self.reading.shape(m)), self.reading.dims[m.name], self.reading.sides[m.name]) for m in self.maps}
        if len(forms) > 1:
            raise NotTileable("joins maps of different sizes")

    def as_called(self, *, shares: bool = False) -> Operation:
        """Return the operation that calls the node on each box as the model does."""
        module = self.module
        if module is not None and self.node.args == (self.source,) and not self.node.kwargs:
            return Operation(lambda given: module(given.patch.tensor), dims=self.dims, shares=shares, plain=module)
        return Operation(lambda given: given.run(), dims=self.dims, shares=shares)
