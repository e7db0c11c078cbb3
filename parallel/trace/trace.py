"""The layers of a model: ``trace`` follows a module's forward as deep as symbolic tracing goes.

Takes any ``nn.Module`` that maps one tensor to anything, and the shape of a microbatch; gives ``Traced``: the
``LayerGraph`` that splitting works on, and the fx graphs of training and evaluation that stages are cut from. Modules
of torch.nn, modules with hooks and modules that cannot be traced stay whole. Symbolic tracing follows Reed et al.,
torch.fx: Practical Program Capture and Transformation for Deep Learning in Python (MLSys 2022).
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, fx, nn

from parallel.graph.layers import INPUT, OUTPUT, Layer, LayerGraph
from parallel.trace.fake_run import Facts, fake_run
from parallel.trace.hints import Hints, any_number_of_values
from parallel.trace.left_as_it_was import left_as_it_was
from parallel.trace.norm_gradients import mend_norm_gradients
from parallel.trace.strided_convolution import mend_strided_convolutions
from parallel.trace.tracer import GraphTracer, scope_of, user_line
from parallel.trace.updated_faults import attribute_fault
from parallel.trace.updated_search import Updated, updated_buffers

DETERMINISTIC = ("torch.nn.", "torch.ao.nn.", "torchvision.", "timm.")
"""Packages whose modules draw random numbers whenever they can, so that one run shows it."""


@dataclass(frozen=True)
class Traced:
    """A model as layers, and the graphs that run them.

    Attributes:
        graph: layers of the training graph.
        training: what runs in training; its modules and tensors are those of ``model``.
        evaluation: what runs in evaluation, the same object where nothing differs. A value that both make has one name.
        model: as it was given.
        modes: path -> (training, evaluation) flags of modules that do not follow the model's ``train()``.
        updated: path -> state outside norm layers that forward passes of training update.
        any_side: nothing that tracing asked of a value depends on the side of the tiles: others give the same graphs.
    """

    graph: LayerGraph
    training: fx.GraphModule
    evaluation: fx.GraphModule
    model: nn.Module
    modes: dict[str, tuple[bool, bool]]
    updated: dict[str, Updated] = field(default_factory=dict)
    any_side: bool = False


def trace(
    module: nn.Module,
    shape: tuple[int, ...],
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    autocast: torch.dtype | None = None,
    whole: Mapping[str, str] = MappingProxyType({}),
    in_place: bool = False,
) -> Traced:
    """Return the layers of ``module`` with what passes between them, and the graphs that run them.

    The module runs in neither sense: no memory is taken, its parameters, buffers and modes stay as they are.

    Args:
        shape: (n, c, h, w) of a microbatch; bytes and flops are for it, the graph holds for every shape.
        device: where the layers will run.
        autocast: type for mixed precision there; None computes in ``dtype``.
        whole: path of a module that is one layer, whatever is in it -> why.
        in_place: ``x += y`` changes the memory of ``x``, as in the model; else a layer gives the sum in its place, and
            neighbours can be cut apart. It matters where what lies in that memory is used by another name.

    Raises:
        ValueError: the module's own forward cannot be traced, or does not run on ``shape``; or forward passes update
            plain attributes.
    """
    mend_norm_gradients()  # before the graph names the functions
    mend_strided_convolutions()
    with left_as_it_was(module), any_number_of_values():
        module.train()
        updated = updated_buffers(module, shape, dtype)
        if fault := attribute_fault(updated):
            raise ValueError(fault)
        opaque = dict(whole)
        modes_in_training = _modes(module)
        training, by_side = _graph(module, opaque, shape, dtype, in_place)
        facts = fake_run(training, shape, dtype, torch.device(device), autocast)
    with left_as_it_was(module):
        module.eval()
        modes_in_evaluation = _modes(module)
        known = len(opaque)
        evaluation, evaluation_by_side = _graph(module, opaque, shape, dtype, in_place)
    if len(opaque) > known:  # a module is whole in both modes, or its parameters would be in several stages
        return trace(module, shape, dtype, device, autocast, opaque, in_place)
    if _program(training) == _program(evaluation):
        evaluation = training
    else:
        _name_alike(training, evaluation)
    modes = {
        path: (mode, modes_in_evaluation[path])
        for path, mode in modes_in_training.items()
        if (mode, modes_in_evaluation[path]) != (True, False)
    }
    graph = _layers(module, training, evaluation, facts, opaque)
    any_side = not (opaque or by_side or evaluation_by_side)
    return Traced(graph, training, evaluation, module, modes, updated, any_side)


def run_again(
    traced: Traced, shape: tuple[int, ...], dtype: torch.dtype = torch.float32, autocast: torch.dtype | None = None
) -> Traced:
    """Return what ``trace`` would for another shape or in mixed precision, with the graphs and the updated state of
    ``traced``: they hold for the same shape, and where they are of ``any_side`` for others.

    Args:
        shape, dtype, autocast: as ``trace`` takes them; of as many tiles as were traced.

    Raises:
        ValueError: the module does not run on ``shape``.
    """
    module = traced.model
    with left_as_it_was(module), any_number_of_values():
        module.train()
        facts = fake_run(traced.training, shape, dtype, torch.device("cpu"), autocast)
    graph = _layers(module, traced.training, traced.evaluation, facts, dict(traced.graph.whole))
    return replace(traced, graph=graph)


def _modes(module: nn.Module) -> dict[str, bool]:
    return {path: submodule.training for path, submodule in module.named_modules()}


def _graph(
    module: nn.Module, opaque: dict[str, str], shape: tuple[int, ...], dtype: torch.dtype, in_place: bool
) -> tuple[fx.GraphModule, bool]:
    """Return the graph of ``module`` in its present mode, and whether it may depend on the side of the tiles; add what
    cannot be traced to ``opaque``, innermost first."""
    while True:
        tracer = GraphTracer(opaque, Hints(module, shape, dtype), in_place=in_place)
        try:
            with left_as_it_was(module), torch.set_grad_enabled(module.training):
                graph = tracer.trace(module)
        except Exception as error:
            if tracer.failed is None:
                raise ValueError(
                    f"the forward of {type(module).__name__} itself cannot be cut into layers: {error}. Where: "
                    f"{_where(error)}. Move what that line decides or switches into a submodule: an nn.Module with a "
                    "forward of its own, made in __init__ and called there; it then stays whole and the rest is cut"
                ) from error
            opaque[tracer.failed] = f"{error}, at {_where(error)}"
        else:
            return fx.GraphModule(module, graph), tracer.by_side


def _where(error: BaseException) -> str:
    """Return the line of the user's code nearest to the fault."""
    line, step = "unknown", error.__traceback__
    while step is not None:
        line, step = user_line(step.tb_frame.f_code, step.tb_lineno) or line, step.tb_next
    return line


def _program(module: fx.GraphModule) -> list[tuple[Any, ...]]:
    """Return all that a graph computes, as values that can be compared."""
    named: Callable[[Any], Any] = lambda value: fx.map_arg(value, lambda node: f"%{node.name}")  # noqa: E731
    return [(n.op, n.name, n.target, repr(named(n.args)), repr(named(n.kwargs))) for n in module.graph.nodes]


def _name_alike(training: fx.GraphModule, evaluation: fx.GraphModule) -> None:
    """Give every node of ``evaluation`` that also runs in training its name there, and others names of their own."""
    ours, theirs = list(evaluation.graph.nodes), list(training.graph.nodes)
    kinds = [[(node.op, node.target, scope_of(node)) for node in nodes] for nodes in (ours, theirs)]
    names: dict[fx.Node, str] = {}
    for start, other, size in difflib.SequenceMatcher(None, kinds[0], kinds[1], autojunk=False).get_matching_blocks():
        names |= {ours[start + k]: theirs[other + k].name for k in range(size)}
    taken = {node.name for node in theirs}
    for node in ours:
        node.name, wish = "", names.get(node) or f"evaluation_{node.name}"
        if node not in names:
            while wish in taken:
                wish += "_"
            taken.add(wish)
        names[node] = wish
    for node in ours:
        node.name = names[node]
    evaluation.recompile()


def _layers(
    module: nn.Module,
    training: fx.GraphModule,
    evaluation: fx.GraphModule,
    facts: dict[str, Facts],
    opaque: dict[str, str],
) -> LayerGraph:
    nodes = list(training.graph.nodes)
    position = {node.name: k for k, node in enumerate(nodes)}
    ranges = [(position[maker], position[node.name]) for node in nodes for maker in facts[node.name].changed]
    uses: dict[int, list[int]] = {}
    layers = []
    for k, node in enumerate(nodes):
        state = _state(training, node)
        for tensor in state:
            last = max([k, *(position[user.name] for user in node.users)]) if node.op == "get_attr" else k
            uses.setdefault(id(tensor), []).extend((k, last))
        fact = facts[node.name]
        params = [t.numel() * t.element_size() for t in state if isinstance(t, nn.Parameter)]
        layers.append(
            Layer(
                name=node.name,
                kind=_kind(training, node),
                inputs=tuple(argument.name for argument in node.all_input_nodes),
                module=str(node.target) if node.op == "call_module" else "",
                scope=str(node.target) if node.op == "call_module" else scope_of(node),
                output_bytes=fact.output_bytes,
                param_bytes=sum(params),
                largest_param_bytes=max(params, default=0),
                flops=fact.flops,
                differentiable=fact.differentiable,
                random=fact.random or _unknown(training, node),
                saved=fact.saved,
                ops=fact.ops,
                output_storages=fact.output_storages,
            )
        )
    ranges += [(min(positions), max(positions)) for positions in uses.values()]
    # What only training does stays with what it works on: evaluation goes around it and can send no more than training.
    common = {node.name for node in evaluation.graph.nodes}
    ranges += [(k - 1, k) for k, node in enumerate(nodes) if node.name not in common]
    classes = {path: type(submodule).__name__ for path, submodule in module.named_modules()}
    return LayerGraph(tuple(layers), merged(ranges), classes, opaque)


def _state(training: fx.GraphModule, node: fx.Node) -> list[Tensor]:
    """Return the parameters and buffers that a node uses, each once."""
    if node.op == "call_module":
        module = training.get_submodule(str(node.target))
        return [*module.parameters(), *module.buffers()]
    if node.op == "get_attr":
        owner, _, name = str(node.target).rpartition(".")
        tensor = getattr(training.get_submodule(owner), name)
        return [tensor] if isinstance(tensor, Tensor) else []
    return []


def _kind(training: fx.GraphModule, node: fx.Node) -> str:
    if node.op == "placeholder":
        return INPUT
    if node.op == "output":
        return OUTPUT
    if node.op == "call_module":
        return type(training.get_submodule(str(node.target))).__name__
    if node.op == "call_function":
        return str(getattr(node.target, "__name__", node.target))
    return "get_attr" if node.op == "get_attr" else str(node.target)


def _unknown(training: fx.GraphModule, node: fx.Node) -> bool:
    """Return whether a module may draw random numbers though it did not in one run."""
    if node.op != "call_module":
        return False
    module = training.get_submodule(str(node.target))
    return any(not type(submodule).__module__.startswith(DETERMINISTIC) for submodule in module.modules())


def merged(ranges: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Return disjoint and sorted ranges that forbid the same cuts; those of one position forbid none."""
    result: list[tuple[int, int]] = []
    for first, last in sorted((first, last) for first, last in ranges if first < last):
        if result and first <= result[-1][1]:
            result[-1] = (result[-1][0], max(last, result[-1][1]))
        else:
            result.append((first, last))
    return tuple(result)
