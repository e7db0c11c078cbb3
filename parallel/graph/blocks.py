"""The blocks of a graph: bottlenecks, Inception modules, cells, levels of a U-Net, and what stands between them.

Takes a ``LayerGraph``; gives consecutive layers that belong together. A region between two values that each carry
everything stays whole: it is a residual or branched block, however the model is written. Where long skips leave no
such values, as in a U-Net, or there are many skips, as in a dense block, the repeated modules inside are the blocks.
Light layers (norms, activations, pools) go with the heavy ones beside them, so that fewest bytes cross.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from parallel.graph.layers import INPUT, OUTPUT, LayerGraph
from parallel.graph.module_paths import heavy_positions, owner_path, repeated, scope_tree, unit_paths
from parallel.graph.single_value_cuts import bytes_across, single_value_cuts


@dataclass(frozen=True, slots=True)
class Block:
    """Layers ``start`` to ``stop`` (not included), named after ``scope``, () where no module is all of the block."""

    start: int
    stop: int
    scope: tuple[str, ...] = ()


def find_blocks(graph: LayerGraph) -> list[Block]:
    """Return the blocks of the graph, in order, without gaps; the model's input and output are in none."""
    return _with_light_layers(graph, unit_paths(graph), regions=True)


def block_cuts(graph: LayerGraph) -> tuple[int, ...]:
    """Return positions in ``graph.layers``, increasing, at which a block begins and a stage may begin."""
    if "block_cuts" not in graph.remembered:
        starts = [block.start for block in find_blocks(graph)[1:]]
        allowed = (start for start in starts if 2 <= start < len(graph.layers) - 1 and graph.can_cut(start))
        graph.remembered["block_cuts"] = tuple(allowed)
    cuts: tuple[int, ...] = graph.remembered["block_cuts"]
    return cuts


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
    """Return blocks around the heavy layers.

    Args:
        unit_of: path of the module that each layer belongs to, () for none.
        regions: keep whole what lies between two single-value cuts.
    """
    heavy = heavy_positions(graph)
    begin = next(k for k, layer in enumerate(graph.layers) if layer.kind != INPUT)
    end = next((k for k, layer in enumerate(graph.layers) if layer.kind == OUTPUT), len(graph.layers))
    if begin >= end:
        return []
    runs = _runs(unit_of, begin, end)
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


def _runs(unit_of: list[tuple[str, ...]], begin: int, end: int) -> list[Block]:
    """Return neighbours of one unit as one block, each other layer as a block alone."""
    runs: list[Block] = []
    for position in range(begin, end):
        if runs and unit_of[position] and unit_of[position] == runs[-1].scope:
            runs[-1] = Block(runs[-1].start, position + 1, runs[-1].scope)
        else:
            runs.append(Block(position, position + 1, unit_of[position]))
    return runs


def _whole_regions(
    graph: LayerGraph, runs: list[Block], unit_of: list[tuple[str, ...]], heavy: frozenset[int]
) -> list[Block]:
    """Return the runs with those of one region put together, unless units repeat in it."""
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
    """Return the runs with those of one unit put together that only light layers stood between."""
    result: list[Block] = []
    for run in runs:
        if result and run.scope and run.scope == result[-1].scope:
            result[-1] = Block(result[-1].start, run.stop, run.scope)
        else:
            result.append(run)
    return result
