"""ResNet-18 that comes to grief: in a given layer, the seventh time it runs in training.

Takes ``FAULT_KIND`` and ``FAULT_FILE`` from the environment; writes the moment into the file. What happens then: a wait
for the signal that ``run`` sends to some rank, a shape nobody asked for, an exception, or a pass without end.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from models.registry import build_model

CUTS = "layer2,layer3"
"""Three stages: the stem and layer1, layer2, the rest."""
PASSES = 7
"""More than a step of any schedule here has, so that the form of every message is known by then."""
LAYER = {
    "killed": "layer2.0",
    "killed while it waits": "layer1.0",
    "stopped": "layer2.0",
    "wrong shape within a stage": "layer2.0",
    "wrong shape for the next stage": "layer2.1",
    "exception": "layer2.0",
    "hangs": "layer2.0",
}
"""Fault -> the layer in which it happens; with the first of them stage 0 dawdles, so that stage 1 waits."""


class Broken(Exception):
    """What is raised for the fault "exception"."""


def make(classes: int, **settings: Any) -> nn.Module:
    """The model, for ``--model benchmarks.faults.model:make``."""
    kind, file = os.environ["FAULT_KIND"], Path(os.environ["FAULT_FILE"])
    model = build_model("resnet18", classes=classes, **settings)
    passes = 0

    def happen(layer: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        nonlocal passes
        passes += layer.training and type(output) is Tensor  # tracing shows it other tensors
        if passes != PASSES:
            return output
        file.write_text(repr(time.time()))
        if kind == "exception":
            raise Broken("this layer was told to fail")
        if kind.startswith("wrong shape"):
            return output[:, 1:]
        time.sleep(3600 if kind == "hangs" else 4)
        return output

    # A module with a hook is not looked into, so that the hook runs with every pass.
    model.get_submodule(LAYER[kind]).register_forward_hook(happen)
    return model
