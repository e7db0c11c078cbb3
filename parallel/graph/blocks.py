"""The blocks of a graph: bottlenecks, Inception modules, cells, levels of a U-Net, and the layers between them.

A region between two values that each carry everything stays whole: it is a residual or branched block, however the
model is written. Where long skips leave no such values, as in a U-Net, or there are many skips, as in a dense block,
the repeated modules inside are the blocks. A module is looked into when it only strings modules together (``layer1``, a
list of cells) or repeats one several times in series, and is a unit otherwise. Light layers (norms, activations, pools)
go with the heavy ones next to them, so that fewest bytes cross.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from parallel import remembered
from parallel.graph.layers import INPUT, OUTPUT, Layer, LayerGraph
from parallel.graph.partition import bytes_across, carries_data, cut_positions, single_value_cuts


def owner_path(layer: Layer) -> tuple[str, ...]:
    """Return the path of the module whose forward calls the layer."""
    path = layer.scope.split(".") if layer.scope else []
    return tuple(path[:-1] if layer.module else path)


def heavy_positions(graph: LayerGraph) -> frozenset[int]:
    """Return positions of the layers that multiply matrices; of all that compute where no flops are known."""
    known = frozenset(position for position, layer in enumerate(graph.layers) if layer.flops > 0)
    return known or frozenset(
        k for k, layer in enumerate(graph.layers) if layer.kind not in (INPUT, OUTPUT, "get_attr")
    )


@dataclass
class Scope:
    """A module that holds layers.

    Attributes:
        positions: in ``graph.layers``, of all layers inside, in order.
        children: modules directly inside that hold layers themselves, in the order they first run.
        computes: its own forward computes something between them, with data.
        heavy: number of layers inside that multiply matrices.
    """

    path: tuple[str, ...]
    positions: list[int] = field(default_factory=list)
    children: dict[str, Scope] = field(default_factory=dict)
    computes: bool = False
    heavy: int = 0

    @property
    def inner(self) -> list[Scope]:
        """Return the children with more than one heavy layer."""
        return [child for child in self.children.values() if child.heavy > 1]


def scope_tree(graph: LayerGraph) -> Scope:
    """Return the model's own scope, with all others inside."""
    root, heavy = Scope(()), heavy_positions(graph)
    for position, layer in enumerate(graph.layers):
        scope, path = root, owner_path(layer)
        for depth in range(len(path) + 1):
            if depth:
                scope = scope.children.setdefault(path[depth - 1], Scope(path[:depth]))
            scope.positions.append(position)
            scope.heavy += position in heavy
        scope.computes = scope.computes or (not layer.module and carries_data(layer))
    return root


def signature(graph: LayerGraph, positions: list[int]) -> tuple[str, ...]:
    """Return what two calls of equal modules have in common: the kinds of their layers."""
    return tuple(graph.layers[position].kind for position in positions)


def in_series(graph: LayerGraph, first: list[int], second: list[int]) -> bool:
    """Return whether a layer of ``second`` depends on one of ``first``; positions of both in order."""
    reached = {graph.layers[position].name for position in first}
    for layer in graph.layers[first[0] : second[-1] + 1]:
        if layer.name not in reached and any(name in reached for name in layer.inputs):
            reached.add(layer.name)
    return any(graph.layers[position].name in reached for position in second)


def repeated(graph: LayerGraph, groups: list[list[int]]) -> list[list[int]]:
    """Return those of ``groups``, in order of their first position, that follow or precede an equal one in series."""
    repeats: set[int] = set()
    latest: dict[tuple[str, ...], int] = {}
    for k, group in enumerate(groups):
        kind = signature(graph, group)
        if kind in latest and in_series(graph, groups[latest[kind]], group):
            repeats |= {latest[kind], k}
        latest[kind] = k
    return [groups[k] for k in sorted(repeats)]


def unit_paths(graph: LayerGraph) -> list[tuple[str, ...]]:
    """Return for each layer the path of its unit; () for layers that are called between units."""
    root = scope_tree(graph)
    copies = Counter(signature(graph, scope.positions) for scope in _all(root))
    opened = {scope.path for scope in _all(root) if _is_opened(graph, scope, root, copies)}
    around = ([path[:depth] for depth in range(len(path) + 1)] for path in map(owner_path, graph.layers))
    return [next((path for path in paths if path not in opened), ()) for paths in around]


def _all(scope: Scope) -> list[Scope]:
    return [scope, *(inside for child in scope.children.values() for inside in _all(child))]


def _is_opened(graph: LayerGraph, scope: Scope, root: Scope, copies: Mapping[tuple[str, ...], int]) -> bool:
    if not scope.path or (2 * scope.heavy > root.heavy and len(scope.inner) > 1) or _only_strings(scope):
        return True
    if not scope.inner:
        # A plain chain, as VGG's: a unit only where the model has it several times.
        return not scope.computes and scope.heavy > 1 and copies[signature(graph, scope.positions)] == 1
    repeats = repeated(graph, [child.positions for child in scope.inner])
    heavy = len(heavy_positions(graph).intersection(position for group in repeats for position in group))
    if 2 * heavy >= scope.heavy:
        return True
    return any(_only_strings(child) and 2 * child.heavy >= scope.heavy for child in scope.inner)


def _only_strings(scope: Scope) -> bool:
    return len(scope.inner) > 1 and not scope.computes


@dataclass(frozen=True, slots=True)
class Block:
    """Layers ``start`` to ``stop`` (not included), named after ``scope``, () where no module is all of the block."""

    start: int
    stop: int
    scope: tuple[str, ...] = ()


def find_blocks(graph: LayerGraph) -> list[Block]:
    """Return the blocks of the graph, in order, without gaps; the model's input and output are in none."""
    return _with_light_layers(graph, unit_paths(graph), regions=True)


@remembered
def block_cuts(graph: LayerGraph) -> tuple[int, ...]:
    """Return positions in ``graph.layers``, increasing, at which a block begins and a stage may begin."""
    allowed = set(cut_positions(graph))
    return tuple(block.start for block in find_blocks(graph)[1:] if block.start in allowed)


def find_modules(graph: LayerGraph) -> list[Block]:
    """Return the model's first level of modules, as ``find_blocks`` returns blocks.

    A module that holds nearly all is looked into where it leaves fewer than three.
    """
    root = scope = scope_tree(graph)
    while True:
        depth = len(scope.path) + 1
        paths = [owner_path(layer)[:depth] for layer in graph.layers]
        outer = [path if path != scope.path[: len(path)] else () for path in paths]
        blocks = _with_light_layers(graph, outer, regions=False)
        wrapped = [
            child for child in scope.children.values() if 10 * child.heavy >= 9 * root.heavy > 0 and child.children
        ]
        if len(blocks) > 2 or not wrapped:
            return blocks
        scope = wrapped[0]


def _with_light_layers(graph: LayerGraph, unit_of: list[tuple[str, ...]], *, regions: bool) -> list[Block]:
    """Return blocks around the heavy layers; with ``regions`` all between two single-value cuts stays whole."""
    heavy = heavy_positions(graph)
    begin = next(k for k, layer in enumerate(graph.layers) if layer.kind != INPUT)
    end = next((k for k, layer in enumerate(graph.layers) if layer.kind == OUTPUT), len(graph.layers))
    if begin >= end:
        return []
    runs = _joined([Block(position, position + 1, unit_of[position]) for position in range(begin, end)])
    if regions:
        runs = _whole_regions(graph, runs, unit_of, heavy)
    rich = _joined([run for run in runs if not heavy.isdisjoint(range(run.start, run.stop))] or runs[:1])
    across = bytes_across(graph)
    starts = [begin]
    for before, after in pairwise(rich):
        small = len(heavy.intersection(range(after.start, after.stop))) == 1
        if before.scope and small and (after is rich[-1] or not after.scope):
            # What stands between a block and a lone linear layer, pooling mostly, makes a head with that layer.
            starts.append(before.stop)
        else:
            between = range(before.stop, after.start + 1)
            allowed = [position for position in between if graph.can_cut(position)] or between
            starts.append(min(allowed, key=lambda position: (across[position], -position)))
    return [Block(start, stop, run.scope) for run, start, stop in zip(rich, starts, [*starts[1:], end], strict=True)]


def _whole_regions(
    graph: LayerGraph, runs: list[Block], unit_of: list[tuple[str, ...]], heavy: frozenset[int]
) -> list[Block]:
    """Return the runs with those of one region joined, unless units repeat in it."""
    inside: set[int] = set()
    for first, last in pairwise([*single_value_cuts(graph), len(graph.layers)]):
        touched = [range(run.start, run.stop) for run in runs if run.scope and run.start < last and run.stop > first]
        large = [list(positions) for positions in touched if len(heavy.intersection(positions)) > 1]
        if not repeated(graph, large):
            inside.update(range(first + 1, last))
    merged: list[Block] = []
    for run in runs:
        if merged and run.start in inside:
            before = merged[-1]
            scope = before.scope if before.scope == run.scope else _common(unit_of[before.start : run.stop])
            merged[-1] = Block(before.start, run.stop, scope)
        else:
            merged.append(run)
    return merged


def _common(paths: list[tuple[str, ...]]) -> tuple[str, ...]:
    first, last = min(paths), max(paths)
    depth = next((k for k, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), min(len(first), len(last)))
    return first[:depth]


def _joined(runs: list[Block]) -> list[Block]:
    """Return the runs with neighbours of one unit joined."""
    result: list[Block] = []
    for run in runs:
        if result and run.scope and run.scope == result[-1].scope:
            result[-1] = Block(result[-1].start, run.stop, run.scope)
        else:
            result.append(run)
    return result
