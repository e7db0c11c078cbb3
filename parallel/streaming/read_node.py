"""From a node of a traced model to how it is computed box by box, or why it cannot be."""

from __future__ import annotations

from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_leaves

from parallel.streaming import read_dropout, read_pointwise, read_reduction, read_window
from parallel.streaming.operation import DIMS, NotTileable, Operation, Reading, attribute

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
ADVICE = "use layers of torch.nn and torch.nn.functional, which docs/streaming.md lists"
UNKNOWN = f"of a kind that boxes do not know: {ADVICE}"

ALONE = read_pointwise.MODULES
"""Layers whose maps may have rows and columns as any dims."""
TURNED = read_window.MODULES | read_reduction.MODULES
"""Layers that take rows and columns as the last two of four dims."""
CALLS = read_pointwise.CALLS | read_reduction.REDUCTIONS
"""Functions, and names of methods, likewise."""
TURNED_CALLS = read_window.FUNCTIONS | read_reduction.POOLS


def read_node(reading: Reading, node: fx.Node) -> Operation:
    """Return how a node that takes maps is computed.

    Raises:
        NotTileable: not box by box.
    """
    _refuse_changed(reading, node)
    if node.op == "call_module":
        module = reading.model.get_submodule(str(node.target))
        _refuse_run_by_box(module)
        for kind in type(module).__mro__:
            if kind in ALONE or kind in TURNED:
                _refuse_other_forward(type(module), kind)
                if kind in ALONE:
                    return ALONE[kind](module, reading, node)
                _refuse_turned(reading, node)
                return TURNED[kind](module, reading, node)
        raise NotTileable(f"is a {type(module).__name__}, {UNKNOWN}")
    target = node.target
    if getattr(target, "__name__", "") == "stochastic_depth":
        return read_dropout.dropped_paths(reading, node)
    if target in CALLS:
        return CALLS[target](reading, node)
    if target in TURNED_CALLS:
        _refuse_turned(reading, node)
        return TURNED_CALLS[target](reading, node)
    maps = reading.maps(node)
    if node.op == "call_function" and len(maps) == 1 and reading.of(node) is reading.of(maps[0]):
        return read_dropout.identity(reading, node)  # it looked at the whole image's size, and passes it on
    raise NotTileable(UNKNOWN)


def _refuse_run_by_box(module: nn.Module) -> None:
    """Hooks, and parameters that count how often they are asked for, as those of a spectral norm."""
    if any(getattr(module, hooks) for hooks in HOOKS):
        raise NotTileable("has hooks, which would run for each box: remove them")
    kinds = getattr(module, "parametrizations", {})
    if any(True for name in kinds for _ in kinds[name].buffers()):
        raise NotTileable("has a parameter that changes each time it is computed: take the parametrization away")


def _refuse_other_forward(kind: type[nn.Module], known: type[nn.Module]) -> None:
    """A layer that is derived from a known one may compute something else."""
    for name in ("forward", "_conv_forward"):
        if getattr(kind, name, None) is not getattr(known, name, None) and known is not _BatchNorm:
            raise NotTileable(f"is a {kind.__name__}, which computes other than {known.__name__}: {ADVICE}")


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
    source = reading.maps(node)[0]
    for other in in_same_memory(reading, node, source):
        if any(node < user for user in other.users):
            raise NotTileable(f"changes {other.name} in place, which is used again by that name")


def in_same_memory(reading: Reading, node: fx.Node, source: fx.Node) -> list[fx.Node]:
    """Return the maps made before ``node`` that may lie in the memory of ``source``, itself among them."""

    root = source
    while root.name in reading.aliases:
        root = reading.aliases[root.name]
    found, looked_at = [], [root]
    while looked_at:  # a map lies in the memory of one that it is made of, so that its owner's users lead to it
        other = looked_at.pop()
        if other < node and other.name in reading.dims:
            found.append(other)
        looked_at += [user for user in other.users if reading.aliases.get(user.name) is other]
    return found


def _refuse_turned(reading: Reading, node: fx.Node) -> None:
    for source in reading.maps(node):
        value = reading.of(source)
        if not isinstance(value, Tensor) or value.dim() != 4 or reading.dims[source.name] != DIMS:
            raise NotTileable("takes rows and columns as other dims than the last two of four")


def has_tensors(value: object) -> bool:
    return any(isinstance(leaf, Tensor) for leaf in tree_leaves(value))


def module_of(model: nn.Module, node: fx.Node) -> nn.Module | None:
    return model.get_submodule(str(node.target)) if node.op == "call_module" else None


def parameters_read(model: nn.Module, node: fx.Node) -> list[nn.Parameter]:
    """Return the parameters that a node computes with."""
    module = module_of(model, node)
    read = [attribute(model, argument) for argument in node.all_input_nodes if argument.op == "get_attr"]
    return [*(module.parameters() if module is not None else ()), *(v for v in read if isinstance(v, nn.Parameter))]
