"""The layers of a model: ``trace`` follows a module's forward as deep as symbolic tracing goes.

Any ``nn.Module`` that maps one tensor to anything becomes a ``LayerGraph``, and the fx graphs of training and
evaluation. Modules of torch.nn, modules with hooks and modules that cannot be traced stay whole. After Reed et al.,
torch.fx: Practical Program Capture and Transformation for Deep Learning in Python (MLSys 2022). A model that keeps
everything on the device of one rank, or cannot be traced, is ``Untraced``: one stage, the model's own call.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import fx, nn

from parallel.comm.communicator import Communicator
from parallel.graph.layers import INPUT, OUTPUT, Layer, LayerGraph
from parallel.strategy import Strategy
from parallel.trace.hints import Hints, any_number_of_values
from parallel.trace.layer_graph import layer_graph
from parallel.trace.patched_kernels import patch_kernels
from parallel.trace.stage_module import StageModule
from parallel.trace.traced_check import first_difference
from parallel.trace.tracer import GraphTracer, scope_of, user_line
from parallel.trace.updated_search import (
    Updated,
    refuse_attributes,
    refuse_checkpointed,
    refuse_updating_copies,
    updated_buffers,
)
from parallel.trace.without_data import exclusively, preserve_module_state


@dataclass(frozen=True)
class Traced:
    """A model as layers, and the graphs that run them.

    Attributes:
        graph: layers of the training graph.
        training: what runs in training; its modules and tensors are those of ``model``.
        evaluation: what runs in evaluation, the same object where nothing differs. A value that both make has one name.
        modes: path -> (training, evaluation) flags of modules that do not follow the model's ``train()``.
        updated: path -> state outside norm layers that forward passes of training update.
        any_side: nothing that tracing asked of a value depends on the size of the tiles: others give the same graphs.
    """

    graph: LayerGraph
    training: fx.GraphModule
    evaluation: fx.GraphModule
    model: nn.Module
    modes: dict[str, tuple[bool, bool]]
    updated: dict[str, Updated] = field(default_factory=dict)
    any_side: bool = False


def trace_exclusively(module: nn.Module, shape: tuple[int, ...], communicator: Communicator) -> Traced:
    """Return what ``trace_as_it_runs`` gives for ``module`` in its own type; every rank calls it.

    Args:
        shape: (n, 3, h, w) of a usual microbatch.

    Raises:
        ValueError: the model cannot be traced.
    """
    with exclusively(communicator):
        return trace_as_it_runs(module, shape, next(module.parameters()).dtype.to_real())


def trace_as_it_runs(module: nn.Module, shape: tuple[int, ...], dtype: torch.dtype) -> Traced:
    """Return what ``trace`` gives, compared with the model itself; modules in which they differ stay whole.

    Raises:
        ValueError: they differ in the model's own forward, the model cannot be traced, or it updates running
            statistics twice.
    """
    refuse_checkpointed(module, shape, dtype)
    whole: dict[str, str] = {}
    in_place = False
    while True:
        traced = trace(module, shape, dtype, whole=whole, in_place=in_place)
        difference = first_difference(traced, shape, dtype)
        if difference is None:
            return traced
        if not in_place:
            in_place = True
            continue
        if not (new := difference.paths - whole.keys() - {""}):
            raise ValueError(difference.text)
        whole |= dict.fromkeys(new, "it does something else while it is traced")


def trace(
    module: nn.Module,
    shape: tuple[int, ...],
    dtype: torch.dtype = torch.float32,
    autocast: torch.dtype | None = None,
    whole: Mapping[str, str] = MappingProxyType({}),
    in_place: bool = False,
) -> Traced:
    """Return the layers of ``module`` with what passes between them, and the graphs that run them.

    The module runs in neither sense: no memory is taken, its parameters, buffers and modes stay as they are.

    Args:
        shape: (n, c, h, w) of a microbatch; bytes and flops are for it, the graph holds for every shape.
        autocast: type for mixed precision, as GPUs compute in it; None computes in ``dtype``.
        whole: path of a module that is one layer, whatever is in it -> why.
        in_place: ``x += y`` changes the memory of ``x``, as in the model; else a layer gives the sum in its place, and
            neighbours can be cut apart. It matters where what lies in that memory is used by another name.

    Raises:
        ValueError: the module's own forward cannot be traced, or does not run on ``shape``; or forward passes update
            plain attributes.
    """
    patch_kernels()  # before the graph names the functions
    opaque = dict(whole)
    with preserve_module_state(module), any_number_of_values():
        module.train()
        updated = updated_buffers(module, shape, dtype)
        refuse_attributes(updated)
        modes_in_training = _modes(module)
        training, by_side = _graph(module, opaque, shape, dtype, in_place)
        known = len(opaque)
    with preserve_module_state(module):
        module.eval()
        modes_in_evaluation = _modes(module)
        evaluation, evaluation_by_side = _graph(module, opaque, shape, dtype, in_place)
    if len(opaque) > known:  # a module is whole in both modes, or its parameters would be in several stages
        return trace(module, shape, dtype, autocast, opaque, in_place)
    if _program(training) == _program(evaluation):
        evaluation = training
    else:
        _name_alike(training, evaluation)
    modes = {
        path: (mode, modes_in_evaluation[path])
        for path, mode in modes_in_training.items()
        if (mode, modes_in_evaluation[path]) != (True, False)
    }
    any_side = not (opaque or by_side or evaluation_by_side)
    traced = Traced(LayerGraph((), whole=opaque), training, evaluation, module, modes, updated, any_side)
    return run_again(traced, shape, dtype, autocast)


def run_again(
    traced: Traced,
    shape: tuple[int, ...],
    dtype: torch.dtype = torch.float32,
    autocast: torch.dtype | None = None,
) -> Traced:
    """Return what ``trace`` would for another shape or in mixed precision, with the graphs and the updated state of
    ``traced``: they hold for the same shape, and where they are of ``any_side`` for others.

    Args:
        shape, dtype, autocast: as ``trace`` takes them; of the number of tiles that was traced.

    Raises:
        ValueError: the module does not run on ``shape``.
    """
    with preserve_module_state(traced.model), any_number_of_values():
        traced.model.train()
        graph = layer_graph(traced, shape, dtype, autocast)
    return replace(traced, graph=graph)


def _modes(module: nn.Module) -> dict[str, bool]:
    return {path: submodule.training for path, submodule in module.named_modules()}


def _graph(
    module: nn.Module, opaque: dict[str, str], shape: tuple[int, ...], dtype: torch.dtype, in_place: bool
) -> tuple[fx.GraphModule, bool]:
    """Return the graph of ``module`` in its present mode, and whether it may depend on the size of the tiles; add what
    cannot be traced to ``opaque``, innermost first."""
    while True:
        tracer = GraphTracer(opaque, Hints(module, shape, dtype), in_place=in_place)
        try:
            with preserve_module_state(module), torch.set_grad_enabled(module.training):
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


@dataclass(frozen=True)
class Untraced:
    """A model as one layer, in the place of ``Traced``."""

    model: nn.Module

    @functools.cached_property
    def graph(self) -> LayerGraph:
        """Return the graph: the images, the model, which may draw random numbers, and the output."""
        model = Layer("model", type(self.model).__name__, ("images",), random=True)
        return LayerGraph((Layer("images", INPUT, ()), model, Layer("output", OUTPUT, ("model",))))


class UntracedModule(StageModule):
    """The stage that calls ``model``. Names of parameters, buffers and modules are those in the model."""

    def __init__(self, model: nn.Module) -> None:
        patch_kernels()
        super().__init__(("images",), ("output",))
        self.model = model
        self.training = model.training
        self._run_training = self._run_evaluation = _call

    @property
    def root(self) -> nn.Module:
        return self.model

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        yield from self.model.named_modules(*args, **kwargs)

    def get_submodule(self, target: str) -> nn.Module:
        return self.model.get_submodule(target)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.model.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.model.load_state_dict(*args, **kwargs)


def _call(stage: nn.Module, images: Any) -> tuple[Any, ...]:
    assert isinstance(stage, UntracedModule)
    return (stage.model(images),)


def trace_as_needed(
    module: nn.Module, shape: tuple[int, ...], communicator: Communicator, strategy: Strategy
) -> Traced | Untraced:
    """Return the layers of ``module`` if the strategy cuts, recomputes or streams them, else the module as it is.

    Activations leave for the host earlier if a model is traced: a user's forward holds what it gave to a module.

    Args:
        shape: (n, 3, h, w) of a usual microbatch.
        communicator: all ranks; each calls it.

    Raises:
        ValueError: the model cannot be traced as the strategy needs, or not be copied.
    """
    policy = strategy.policy
    needed = strategy.splits or policy.segmented or policy.stream is not None
    if needed or policy.moves:
        try:
            traced = trace_exclusively(module, shape, communicator)
            if needed or not traced.updated:
                return traced
        except ValueError:
            if needed:
                raise
    refuse_updating_copies(module, shape, communicator, strategy.name)
    return Untraced(module)
