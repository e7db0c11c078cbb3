"""Units of a model by the paths of its modules: those that are its blocks, whatever calls them.

Takes a ``LayerGraph``; gives the unit of each layer. A module is looked into when it only strings modules together
(``layer1``, a list of cells) or repeats one several times in series (a dense block), and is a unit otherwise: a
bottleneck, an Inception module, a cell, a level of a U-Net.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from parallel.graph.layers import INPUT, OUTPUT, Layer, LayerGraph
from parallel.graph.single_value_cuts import carries_data


def owner_path(layer: Layer) -> tuple[str, ...]:
    """Return the path of the module whose forward calls the layer."""
    path = layer.scope.split(".") if layer.scope else []
    return tuple(path[:-1] if layer.module else path)


def heavy_positions(graph: LayerGraph) -> frozenset[int]:
    """Return positions of the layers that multiply matrices: convolutions, linear layers, attention; of all that
    compute where the graph knows no flops."""
    known = frozenset(position for position, layer in enumerate(graph.layers) if layer.flops > 0)
    return known or frozenset(
        k for k, layer in enumerate(graph.layers) if layer.kind not in (INPUT, OUTPUT, "get_attr")
    )


@dataclass
class Scope:
    """A module that holds layers.

    Attributes:
        path: in the model.
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
    """Return those of ``groups`` (positions, in order of their first) that follow or precede an equal one, in
    series."""
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
    copies: dict[tuple[str, ...], int] = {}
    for scope in _all(root):
        kind = signature(graph, scope.positions)
        copies[kind] = copies.get(kind, 0) + 1
    opened = {scope.path for scope in _all(root) if _is_opened(graph, scope, root, copies)}
    result: list[tuple[str, ...]] = []
    for layer in graph.layers:
        path = owner_path(layer)
        depth = next((depth for depth in range(len(path) + 1) if path[:depth] not in opened), None)
        result.append(() if depth is None else path[:depth])
    return result


def _all(scope: Scope) -> list[Scope]:
    return [scope, *(inside for child in scope.children.values() for inside in _all(child))]


def _is_opened(graph: LayerGraph, scope: Scope, root: Scope, copies: dict[tuple[str, ...], int]) -> bool:
    if not scope.path or (2 * scope.heavy > root.heavy and len(scope.inner) > 1):
        return True
    if _only_strings(scope):
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
    """Return whether the module only strings several others together."""
    return len(scope.inner) > 1 and not scope.computes
