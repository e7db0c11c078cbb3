"""Code for nodes of a traced model: functions that run a whole stage, or its segments."""

from __future__ import annotations

import linecache
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from torch import fx

from parallel.graph.partition import Partition
from parallel.memory.policy import Segment
from parallel.trace.stage_module import Run, SegmentRun, StageModule
from parallel.trace.trace import Traced

MakeRun = Callable[[Sequence[fx.Node], tuple[str, ...], tuple[str, ...], dict[str, str], str], Run]
"""As ``compiled``."""


def segment_runs(
    module: StageModule,
    traced: Traced,
    nodes: Sequence[fx.Node],
    partition: Partition,
    segments: Sequence[Segment],
    make_run: MakeRun,
) -> Iterator[SegmentRun]:
    """Yield the segments of a stage, ready to run by what ``make_run`` gives; none where no segment is computed
    again."""
    if not any(segment.recompute for segment in segments):
        return
    position = partition.graph.position
    nodes_of = [[node for node in nodes if s.start <= position[node.name] < s.stop] for s in segments]
    used = [{argument.name for node in inside for argument in node.all_input_nodes} for inside in nodes_of]
    made = [{node.name for node in inside if node.op != "placeholder"} for inside in nodes_of]
    for k, (segment, inside) in enumerate(zip(segments, nodes_of, strict=True)):
        later = set(module.outputs).union(*used[k + 1 :])
        entering = tuple(sorted(used[k] - made[k], key=lambda name: position[name]))
        leaving = tuple(node.name for node in inside if node.name in made[k] & later)
        before = set(module.inputs).union(*made[:k])
        layers = partition.graph.layers[segment.start : segment.stop]
        yield SegmentRun(
            make_run(inside, entering, leaving, {}, f"layers {segment.start} to {segment.stop}"),
            entering,
            leaving,
            tuple(sorted(name for name in before & used[k] if name not in later)),
            segment.recompute,
            any(layer.random for layer in layers),
            frozenset(
                submodule
                for path in paths_of(inside, "call_module")
                for submodule in traced.model.get_submodule(path).modules()
            ),
        )


def compiled(
    nodes: Sequence[fx.Node], inputs: tuple[str, ...], outputs: tuple[str, ...], slots: dict[str, str], name: str
) -> Run:
    """Return a function (stage module, values) -> values that runs ``nodes``; it lets go of values after their last
    use.

    Args:
        inputs, outputs: names of the values it takes and gives.
        slots: value of evaluation -> value in whose place it travels.
        name: of the code in tracebacks.
    """
    graph = fx.Graph()
    copies: dict[str, fx.Node] = {}
    for value in inputs:
        copies[value] = graph.placeholder(value)
    for value, slot in slots.items():
        if slot in copies:
            copies[value] = copies[slot]
    results: dict[str, Any] = {}
    for node in nodes:
        if node.op == "output":
            results[node.name] = fx.map_arg(node.args[0], lambda argument: copies[argument.name])
        elif node.op != "placeholder":
            copies[node.name] = graph.node_copy(node, lambda argument: copies[argument.name])
    results |= {slot: copies[value] for value, slot in slots.items() if slot in outputs}
    graph.output(tuple(results.get(value, copies.get(value)) for value in outputs))
    code = graph.python_code("self")
    file = f"<{name}>"
    linecache.cache[file] = (len(code.src), None, code.src.splitlines(keepends=True), file)
    space = dict(code.globals)
    exec(compile(code.src, file, "exec"), space)
    run: Run = space["forward"]
    return run


def paths_of(nodes: Iterable[fx.Node], op: str) -> set[str]:
    """Return the targets of the ``nodes`` of kind ``op``."""
    return {str(node.target) for node in nodes if node.op == op}
