"""A small classifier that fails in its second stage (cut at ``3``), for tests of what a run says then.

``FAULT`` in the environment says how: "killed" or "shape". It happens in the fourth pass in training.
"""

from __future__ import annotations

import os
import signal
from typing import Any

from torch import Tensor, nn

from tests.helpers.tiny_models import classifier

PASSES = 4


def failing(classes: int) -> nn.Module:
    model = classifier(classes)
    passes = 0

    def happen(layer: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        nonlocal passes
        passes += layer.training and type(output) is Tensor  # tracing shows it other tensors
        if passes < PASSES:
            return output
        if os.environ["FAULT"] == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        return output[:, 1:]

    model.get_submodule("4").register_forward_hook(happen)
    return model
