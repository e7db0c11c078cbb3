"""Random graphs of layers: skips, values in shared memory, layers that belong together; and what a stage of one costs.

The costs are written as directly as they can be, for comparison with what is computed faster.
"""

from __future__ import annotations

import random

from parallel.graph.layers import INPUT, OUTPUT, Layer, LayerGraph, Op


def random_graph(seed: int, most: int = 9) -> LayerGraph:
    """5 to ``most`` layers, the model's input and output among them."""
    draw = random.Random(seed)
    count = draw.randint(5, most)
    layers: list[Layer] = []
    memory: dict[str, tuple[tuple[int, int], ...]] = {}
    for k in range(count):
        last = k == count - 1
        sources = {k - 1, *draw.sample(range(k), draw.randint(0, min(2, k)))} if k and not last else {k - 1} - {-1}
        inputs = tuple(f"v{i}" for i in sorted(sources))
        size = draw.choice([8, 16, 32, 40])
        in_place = 0 < k < count - 1 and draw.random() < 0.2
        gives = memory[inputs[-1]] if in_place or last else ((k, size),)
        memory[f"v{k}"] = gives
        seen = [piece for name in inputs for piece in memory[name]]
        saved = {*draw.sample(seen, draw.randint(0, len(seen))), *(gives if draw.random() < 0.5 else ())}
        if draw.random() < 0.3:
            saved.add((100 + k, draw.choice([4, 24])))
        if k == 0 or last:
            saved = set()
        layers.append(
            Layer(
                name=f"v{k}",
                kind=INPUT if k == 0 else OUTPUT if last else "work",
                inputs=inputs,
                output_bytes=sum(size for _, size in gives),
                param_bytes=draw.choice([0, 8, 64]) if not last and k else 0,
                differentiable=k > 0 and (last or draw.random() < 0.9),
                saved=tuple(sorted(saved)),
                ops=() if k == 0 or last else (Op(draw.choice(["work", "work", "add"]), 0, 0, 0),),
                output_storages=gives,
            )
        )
    first = draw.randint(1, count - 3)
    held = ((first, min(first + draw.randint(1, 2), count - 2)),) if draw.random() < 0.4 else ()
    return LayerGraph(tuple(layers), held)


def received(graph: LayerGraph, start: int, stop: int) -> set[str]:
    """Names of the values that layers from ``start`` to ``stop``, not included, use and others before them made."""
    return {
        name
        for layer in graph.layers[start:stop]
        for name in layer.inputs
        if graph.position[name] < start or graph.by_name[name].kind == INPUT
    }


def travelling_bytes(graph: LayerGraph, start: int, stop: int) -> int:
    """Received from other stages, and sent back as gradients."""
    names = {name for name in received(graph, start, stop) if graph.position[name] < start}
    values = [graph.by_name[name] for name in names]
    return sum(value.output_bytes * (1 + value.differentiable) for value in values)


def kept_bytes(graph: LayerGraph, start: int, stop: int) -> int:
    """For the backward pass of these layers, each piece of memory once."""
    found = {piece for layer in graph.layers[start:stop] for piece in layer.saved}
    found |= {piece for name in received(graph, start, stop) for piece in graph.by_name[name].output_storages}
    return sum(size for _, size in found)
