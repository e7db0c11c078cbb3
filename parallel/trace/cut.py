"""Cut a stage out of a traced model: a module that runs the user's own modules, at their paths in the whole model."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Sequence
from typing import Any

from torch import Tensor, fx, nn

from parallel.graph.layers import RANDOM_STATE
from parallel.graph.partition import Partition
from parallel.memory.policy import Segment
from parallel.trace.stage_module import MakeRun, StageModule, compiled, paths_of, segment_runs
from parallel.trace.trace import Traced
from parallel.trace.without_data import state_of


def cut_stage(
    traced: Traced,
    partition: Partition,
    stage: int,
    segments: Sequence[Segment] = (),
    kind: type[StageModule] = StageModule,
    make_run: MakeRun = compiled,
    left_out: Collection[str] = (),
) -> StageModule:
    """Return stage ``stage`` of the model, in training mode or not as the model is.

    Args:
        segments: that cover it, where it is to be run segment by segment.
        kind: class of the module.
        make_run: what runs its nodes.
        left_out: names of nodes that others compute: the module does not hold what only they use.

    Raises:
        ValueError: evaluation would need values that training does not send between these stages.
    """
    placed = {layer.name: partition.stage_of(layer.name) for layer in partition.graph.layers}
    training = [node for node in traced.training.graph.nodes if placed[node.name] == stage]
    slots: dict[str, str] = {}
    if traced.evaluation is traced.training:
        evaluation = training
    else:
        placed = _stages_in_evaluation(traced, partition, placed)
        slots = _slots(traced, partition, placed)
        evaluation = [node for node in traced.evaluation.graph.nodes if placed[node.name] == stage]
    module = kind(partition.inputs_of(stage), partition.outputs_of(stage))
    nodes = [node for node in (*training, *evaluation) if not _is_left_out(node, left_out)]
    _install(module, traced, nodes, unused=stage == partition.depth - 1)
    ends = module.inputs, module.outputs
    module._run_training = make_run(training, *ends, {}, f"stage {stage} in training")
    module._run_evaluation = make_run(evaluation, *ends, slots, f"stage {stage} in evaluation")
    module.segments = tuple(segment_runs(module, traced.model, training, partition, segments, make_run))
    held = {id(submodule) for submodule in module.modules()}
    for path, modes in traced.modes.items():
        submodule = traced.model.get_submodule(path)
        if id(submodule) in held:
            module._modes.append((submodule, *modes))
    module.training = traced.model.training
    return module


def _is_left_out(node: fx.Node, names: Collection[str]) -> bool:
    users = [user.name for user in node.users] if node.op == "get_attr" else [node.name]
    return bool(users) and all(name in names for name in users)


def _stages_in_evaluation(traced: Traced, partition: Partition, stages: dict[str, int]) -> dict[str, int]:
    """Return the stage of every node of the evaluation graph: that of training, else of its module and inputs."""
    of_paths = ("call_module", "get_attr")
    owners = {str(n.target): stages[n.name] for n in traced.training.graph.nodes if n.op in of_paths}
    nodes = list(traced.evaluation.graph.nodes)
    placed: dict[str, int] = {}
    for node in nodes:
        earliest = max((placed[argument.name] for argument in node.all_input_nodes), default=0)
        owner = owners.get(str(node.target), earliest) if node.op in of_paths else earliest
        placed[node.name] = stages.get(node.name, owner)
    for node in reversed(nodes):  # what takes nothing from other layers is made where it is used
        if not node.all_input_nodes and node.name not in stages and str(node.target) not in owners and node.users:
            placed[node.name] = min(placed[user.name] for user in node.users)
    return placed


def _slots(traced: Traced, partition: Partition, placed: dict[str, int]) -> dict[str, str]:
    """Return value that only evaluation sends -> value that only training sends, in whose place it travels."""
    offered: dict[str, set[int]] = {}
    for edge in partition.edges:
        offered.setdefault(edge.value, set()).add(edge.target)
    needed: dict[str, set[int]] = {}
    for node in traced.evaluation.graph.nodes:
        for argument in node.all_input_nodes:
            if placed[argument.name] != placed[node.name]:
                needed.setdefault(argument.name, set()).add(placed[node.name])
    free = {value: targets for value, targets in offered.items() if value not in needed}
    slots: dict[str, str] = {}
    faults = []
    for value, targets in needed.items():
        if targets <= offered.get(value, set()):
            continue
        source = placed[value]
        fitting = [v for v, t in free.items() if v != RANDOM_STATE and partition.stage_of(v) == source and targets <= t]
        if fitting and min(targets) > source:
            slots[value] = fitting[0]
            del free[fitting[0]]
        else:
            faults.append(f"{value} from stage {source} to {', '.join(map(str, sorted(targets)))}")
    if faults:
        begin = ", ".join(partition.graph.layers[start].name for start in partition.starts[1:])
        raise ValueError(
            f"evaluation would send values between stages where training sends none: {'; '.join(faults)}. The model "
            f"does different things in its two modes near a cut; stages begin at {begin}: cut elsewhere"
        )
    return slots


def _install(module: StageModule, traced: Traced, nodes: Sequence[fx.Node], *, unused: bool) -> None:
    """Give ``module`` what ``nodes`` use, in the model's order; with ``unused`` also what no layer uses."""
    model, state = traced.model, state_of(traced.model)
    held = used_tensors(traced, nodes)
    if unused:
        everywhere = [*traced.training.graph.nodes, *traced.evaluation.graph.nodes]
        held |= {id(tensor) for tensor in state.values()} - used_tensors(traced, everywhere)
    called = paths_of(nodes, "call_module")
    values = {path: _value_at(traced, path) for path in sorted(paths_of(nodes, "get_attr"))}
    values |= {path: tensor for path, tensor in state.items() if id(tensor) in held}
    parents = {path[:k] for path in (*called, *values) for k, letter in enumerate(path) if letter == "."}
    names_in: dict[str, list[str]] = {}
    for path in values:
        owner, _, name = path.rpartition(".")
        names_in.setdefault(owner, []).append(name)

    def fill(stage: nn.Module, source: nn.Module, path: str) -> None:
        names = names_in.get(path, [])
        for name in sorted(names, key=[*source._parameters, *source._buffers, *names].index):
            persistent = name in source._buffers and name not in source._non_persistent_buffers_set
            _register(stage, name, values[_join(path, name)], persistent)
        for name, child in source._modules.items():
            if child is None or (inner := _join(path, name)) not in called | parents:
                continue
            stage.add_module(name, child if inner in called else nn.Module())
            if inner not in called:
                fill(stage.get_submodule(name), child, inner)

    fill(module, model, "")


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def used_tensors(traced: Traced, nodes: Sequence[fx.Node]) -> set[int]:
    """Return the ids of the parameters, buffers and other tensors that ``nodes`` use."""
    layers = [traced.model.get_submodule(path) for path in paths_of(nodes, "call_module")]
    tensors = [tensor for layer in layers for tensor in (*layer.parameters(), *layer.buffers())]
    return {*map(id, tensors), *(id(_value_at(traced, path)) for path in paths_of(nodes, "get_attr"))}


def _value_at(traced: Traced, path: str) -> Any:
    """Return what the model has at ``path`` now, since ``to()`` replaces buffers; constants are in the graph."""
    owner, _, name = path.rpartition(".")
    for graph in (traced.model, traced.training, traced.evaluation):
        with contextlib.suppress(AttributeError):
            return getattr(graph.get_submodule(owner), name)
    raise AssertionError(path)


def _register(owner: nn.Module, name: str, value: Any, persistent: bool) -> None:
    if isinstance(value, nn.Parameter):
        owner.register_parameter(name, value)
    elif isinstance(value, Tensor):
        owner.register_buffer(name, value, persistent=persistent)
    else:
        setattr(owner, name, value)
