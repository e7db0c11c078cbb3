"""One stage of a model as a module of its own: ``cut_stage`` takes the layers between two cuts out of a traced model.

Takes what ``trace`` and a partition gave; gives a ``StageModule`` that maps the values the stage receives to those it
sends. It runs the user's modules themselves, at their paths in the whole model, and holds nothing of other stages.
"""

from __future__ import annotations

import linecache
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor, fx, nn

from parallel.partition import Partition
from parallel.trace import Traced

Run = Callable[..., tuple[Any, ...]]


class StageModule(nn.Module):
    """The layers of one stage. ``named_parameters()`` and ``state_dict()`` have the names of the whole model.

    Attributes:
        inputs: names of the values ``forward`` takes, in order.
        outputs: names of the values it gives, in order. Those that only training makes are None in evaluation.
    """

    def __init__(self, inputs: tuple[str, ...], outputs: tuple[str, ...]) -> None:
        super().__init__()
        self.inputs = inputs
        self.outputs = outputs
        self._run_training: Run
        self._run_evaluation: Run
        self._modes: list[tuple[nn.Module, bool, bool]] = []

    def forward(self, *values: Any) -> tuple[Any, ...]:
        """The values named in ``outputs`` from those named in ``inputs``."""
        return (self._run_training if self.training else self._run_evaluation)(self, *values)

    def train(self, mode: bool = True) -> StageModule:
        """As the whole model's ``train()``, which may keep some modules in a mode of their own."""
        super().train(mode)
        for module, training, evaluation in self._modes:
            module.training = training if mode else evaluation
        return self


def cut_stage(traced: Traced, partition: Partition, stage: int) -> StageModule:
    """Stage ``stage`` of the model, in training mode or not as the model is.

    Raises:
        ValueError: evaluation would need values that training does not send between these stages.
    """
    module = StageModule(partition.inputs_of(stage), partition.outputs_of(stage))
    stages = {layer.name: partition.stage_of(layer.name) for layer in partition.graph.layers}
    in_evaluation = stages if traced.evaluation is traced.training else _stages_in_evaluation(traced, partition, stages)
    nodes = {
        mode: [node for node in graph.graph.nodes if placed[node.name] == stage]
        for mode, graph, placed in (
            ("training", traced.training, stages),
            ("evaluation", traced.evaluation, in_evaluation),
        )
    }
    for mode, graph in (("training", traced.training), ("evaluation", traced.evaluation)):
        _install(module, graph, nodes[mode], traced.model)
    _install_aliases(module, traced, unused=stage == partition.depth - 1)
    module._run_training = _compile(nodes["training"], module, f"stage {stage} in training")
    module._run_evaluation = _compile(nodes["evaluation"], module, f"stage {stage} in evaluation")
    own = {id(part) for part in module.modules()}
    for path, (training, evaluation) in traced.modes.items():
        part = traced.model.get_submodule(path)
        if id(part) in own:
            module._modes.append((part, training, evaluation))
    module.training = traced.model.training
    return module


def _stages_in_evaluation(traced: Traced, partition: Partition, stages: dict[str, int]) -> dict[str, int]:
    """Stage of every node of the evaluation graph: that of training, else where its module and its inputs are."""
    owners = {
        str(node.target): stages[node.name]
        for node in traced.training.graph.nodes
        if node.op in ("call_module", "get_attr")
    }
    sent = {(edge.source, edge.target, edge.value) for edge in partition.edges}
    nodes = list(traced.evaluation.graph.nodes)
    placed: dict[str, int] = {}
    for node in nodes:
        earliest = max((placed[argument.name] for argument in node.all_input_nodes), default=0)
        placed[node.name] = stages.get(node.name, owners.get(str(node.target), earliest))
    for node in reversed(nodes):  # what takes nothing from other layers is made where it is used
        if not node.all_input_nodes and node.name not in stages and str(node.target) not in owners and node.users:
            placed[node.name] = min(placed[user.name] for user in node.users)
    missing = sorted(
        f"{argument.name} from stage {placed[argument.name]} to {placed[node.name]}"
        for node in nodes
        for argument in node.all_input_nodes
        if placed[argument.name] != placed[node.name]
        and (placed[argument.name], placed[node.name], argument.name) not in sent
    )
    if missing:
        raise ValueError(
            f"evaluation would send values between stages that training does not: {', '.join(missing)}. The model does "
            f"different things in the two modes there; stages begin at "
            f"{', '.join(partition.graph.layers[start].name for start in partition.starts[1:])}: cut elsewhere"
        )
    return placed


def _compile(nodes: Sequence[fx.Node], module: StageModule, name: str) -> Run:
    """A function (stage module, values) -> values that runs ``nodes``; values are let go of after their last use."""
    graph = fx.Graph()
    copies: dict[str, fx.Node] = {}
    own = {node.name for node in nodes}
    for value in module.inputs:
        copies[value] = graph.placeholder(value)
    results: dict[str, Any] = {}
    for node in nodes:
        if node.op == "output":
            results[node.name] = fx.map_arg(node.args[0], lambda argument: copies[argument.name])
        elif node.op != "placeholder":
            copies[node.name] = graph.node_copy(node, lambda argument: copies[argument.name])
    graph.output(tuple(results.get(value, copies.get(value)) for value in module.outputs))
    assert own
    code = graph.python_code("self")
    file = f"<{name}>"
    linecache.cache[file] = (len(code.src), None, code.src.splitlines(keepends=True), file)
    space = dict(code.globals)
    exec(compile(code.src, file, "exec"), space)
    run: Run = space["forward"]
    return run


def _install(module: StageModule, graph: fx.GraphModule, nodes: Iterable[fx.Node], model: nn.Module) -> None:
    """Put the modules and tensors that ``nodes`` name where their paths say."""
    modules = sorted({str(node.target) for node in nodes if node.op == "call_module"}, key=len)
    for path in modules:
        owner, name = _owner(module, path)
        if name not in owner._modules:
            owner.add_module(name, graph.get_submodule(path))
    for path in sorted({str(node.target) for node in nodes if node.op == "get_attr"}):
        source, _, name = path.rpartition(".")
        _register(module, path, getattr(graph.get_submodule(source), name), _persistent(model, path))


def _install_aliases(module: StageModule, traced: Traced, *, unused: bool) -> None:
    """Every name that the model's state has for what the stage holds; the last stage also keeps what no layer uses."""
    model = traced.model
    state = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    own = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
    if unused:
        used = {
            id(tensor)
            for graph in (traced.training, traced.evaluation)
            for tensor in (*graph.parameters(), *graph.buffers())
        }
        own |= {id(tensor) for _, tensor in state} - used
    for path, tensor in state:
        if id(tensor) in own:
            _register(module, path, tensor, _persistent(model, path))


def _owner(module: nn.Module, path: str) -> tuple[nn.Module, str]:
    """The module that holds ``path`` and the last part of it; modules on the way are made where there are none."""
    *way, name = path.split(".")
    for part in way:
        if part not in module._modules:
            module.add_module(part, nn.Module())
        child = module._modules[part]
        assert child is not None
        module = child
    return module, name


def _register(module: nn.Module, path: str, value: Any, persistent: bool) -> None:
    owner, name = _owner(module, path)
    if name in owner._parameters or name in owner._buffers or name in owner.__dict__:
        return
    if isinstance(value, nn.Parameter):
        owner.register_parameter(name, value)
    elif isinstance(value, Tensor):
        owner.register_buffer(name, value, persistent=persistent)
    else:
        setattr(owner, name, value)


def _persistent(model: nn.Module, path: str) -> bool:
    """Whether the model's ``state_dict`` has the tensor; constants made while tracing are in no model."""
    source, _, name = path.rpartition(".")
    try:
        owner = model.get_submodule(source)
    except AttributeError:
        return False
    return name in owner._buffers and name not in owner._non_persistent_buffers_set
