"""Pictures of models in the documents, drawn by the code: ``python -m tests.helpers.graph_pictures`` writes them anew.

Times are those of a nominal device, so that every machine draws the same.
"""

from __future__ import annotations

import functools
from pathlib import Path

import torch

from models.registry import build_model
from parallel.draw.graph_svg import graph_svg
from parallel.draw.outline import ModelView
from parallel.graph.layers import LayerGraph
from parallel.graph.partition import partition_at
from parallel.trace.trace import trace

FOLDER = Path(__file__).parents[2] / "docs" / "pictures"

PICTURES = {
    "graph_unet.svg": ("unet", "U-Net", ("down_1", "decoder.1", "decoder.3")),
    "graph_amoebanet.svg": ("amoebanet(18,256)", "AmoebaNet-D (18, 256)", ("cells.4", "cells.8", "cells.15")),
    "graph_inception.svg": ("torchvision:inception_v3", "Inception v3", ("Conv2d_3b_1x1", "Mixed_6a", "Mixed_6e")),
    "graph_densenet.svg": (
        "torchvision:densenet121",
        "DenseNet-121",
        ("features.denseblock1.denselayer5", "features.denseblock2.denselayer3", "features.denseblock3.denselayer1"),
    ),
}
"""File -> (model, what it is called, where its stages begin)."""

NOMINAL_FLOPS, NOMINAL_BANDWIDTH = 10e12, 500e9


@functools.cache
def traced(name: str) -> LayerGraph:
    """Layers of a model for a microbatch of one tile of 512 px; no memory is taken."""
    with torch.device("meta"):
        model = build_model(name, classes=2)
    return trace(model, (1, 3, 512, 512)).graph


def picture(file: str) -> str:
    """The text of one of ``PICTURES``."""
    name, called, cuts = PICTURES[file]
    graph = traced(name)
    forward_s = [layer.flops / NOMINAL_FLOPS + 3 * layer.output_bytes / NOMINAL_BANDWIDTH for layer in graph.layers]
    view = ModelView(
        graph,
        partition=partition_at(graph, cuts),
        forward_s=forward_s,
        backward_s=[2 * seconds for seconds in forward_s],
        title=f"{called}: one tile of 512 px, {len(cuts) + 1} stages, at 10 TFLOP/s",
    )
    return graph_svg(view)


if __name__ == "__main__":
    for name in PICTURES:
        (FOLDER / name).write_text(picture(name))
