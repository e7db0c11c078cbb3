"""From a node of a traced model to how it is computed box by box, or why it cannot be."""

from __future__ import annotations

from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

from parallel.streaming import read_pointwise, read_window
from parallel.streaming.operation import DIMS, Operation, Reading, SpansImage


def read_node(reading: Reading, node: fx.Node) -> Operation:
    """Return how a node that takes maps is computed.

    Raises:
        SpansImage: not box by box.
    """
    _refuse_changed(reading, node)
    if node.op == "call_module":
        module = reading.model.get_submodule(str(node.target))
        for kind in type(module).__mro__:
            if kind in read_window.MODULES:
                _refuse_turned(reading, node)
                return read_window.MODULES[kind](module, reading, node)
            if kind in read_pointwise.MODULES:
                return read_pointwise.MODULES[kind](module, reading, node)
        raise SpansImage("is of a kind that boxes do not know")
    target = node.target
    if getattr(target, "__name__", "") == "stochastic_depth":
        return read_pointwise.dropped_paths(reading, node)
    if target in read_window.FUNCTIONS:
        if target not in read_window.REDUCTIONS:
            _refuse_turned(reading, node)
        return read_window.FUNCTIONS[target](reading, node)
    if target in read_pointwise.CALLS:
        return read_pointwise.CALLS[target](reading, node)
    maps = reading.maps(node)
    if node.op == "call_function" and len(maps) == 1 and reading.of(node) is reading.of(maps[0]):
        return read_pointwise.identity(reading, node)  # it looked at the whole image's size, and passes it on
    raise SpansImage("is of a kind that boxes do not know")


def changes_in_place(reading: Reading, node: fx.Node) -> bool:
    """Whether a node writes into what it takes first."""
    if node.op == "call_module":
        return bool(getattr(reading.model.get_submodule(str(node.target)), "inplace", False))
    if node.op == "call_method":
        return str(node.target).endswith("_") and not str(node.target).endswith("__")
    return node.target in read_pointwise.IN_PLACE or bool(node.kwargs.get("inplace"))


def _refuse_changed(reading: Reading, node: fx.Node) -> None:
    """Boxes put what is written in place into memory of its own, which whoever uses the old name would miss."""
    if not changes_in_place(reading, node):
        return
    source: fx.Node | None = reading.maps(node)[0]
    while source is not None:
        if any(node < user for user in source.users):
            raise SpansImage(f"changes {source.name} in place, which is used again by that name")
        source = reading.lies_in.get(source.name)


def _refuse_turned(reading: Reading, node: fx.Node) -> None:
    for source in reading.maps(node):
        value = reading.of(source)
        if not isinstance(value, Tensor) or value.dim() != 4 or reading.dims[source.name] != DIMS:
            raise SpansImage("takes rows and columns as other dims than the last two of four")


def has_tensors(value: object) -> bool:
    return any(isinstance(leaf, Tensor) for leaf in tree_leaves(value))


def module_of(model: nn.Module, node: fx.Node) -> nn.Module | None:
    return model.get_submodule(str(node.target)) if node.op == "call_module" else None
