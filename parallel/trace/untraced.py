"""A model that keeps everything on the device of one rank, or cannot be traced: one stage, the model's own call."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from parallel.comm.communicator import Communicator
from parallel.graph.layers import INPUT, OUTPUT, Layer, LayerGraph
from parallel.strategy import Strategy
from parallel.trace.patched_kernels import patch_kernels
from parallel.trace.stage_module import StageModule
from parallel.trace.trace import Traced, trace_exclusively
from parallel.trace.updated_faults import refuse_updating_copies


@dataclass(frozen=True)
class Untraced:
    """A model as one layer, in the place of ``Traced``."""

    model: nn.Module

    @functools.cached_property
    def graph(self) -> LayerGraph:
        """Return the graph: the images, the model, which may draw random numbers, and the output."""
        model = Layer("model", type(self.model).__name__, ("images",), random=True)
        return LayerGraph((Layer("images", INPUT, ()), model, Layer("output", OUTPUT, ("model",))))


class UntracedModule(StageModule):
    """The stage that calls ``model``. Names of parameters, buffers and modules are those in the model."""

    def __init__(self, model: nn.Module) -> None:
        patch_kernels()
        super().__init__(("images",), ("output",))
        self.model = model
        self.training = model.training
        self._run_training = self._run_evaluation = _call

    @property
    def root(self) -> nn.Module:
        return self.model

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        yield from self.model.named_modules(*args, **kwargs)

    def get_submodule(self, target: str) -> nn.Module:
        return self.model.get_submodule(target)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.model.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.model.load_state_dict(*args, **kwargs)


def _call(stage: nn.Module, images: Any) -> tuple[Any, ...]:
    assert isinstance(stage, UntracedModule)
    return (stage.model(images),)


def trace_as_needed(
    module: nn.Module, shape: tuple[int, ...], communicator: Communicator, strategy: Strategy
) -> Traced | Untraced:
    """Return the layers of ``module`` if the strategy cuts, recomputes or streams them, else the module as it is.

    Activations leave for the host earlier if a model is traced: a user's forward holds what it gave to a module.

    Args:
        shape: (n, 3, h, w) of a usual microbatch.
        communicator: all ranks; each calls it.

    Raises:
        ValueError: the model cannot be traced as the strategy needs, or not be copied.
    """
    policy = strategy.policy
    needed = strategy.splits or policy.segmented or policy.stream is not None
    if needed or policy.moves:
        try:
            traced = trace_exclusively(module, shape, communicator)
            if needed or not traced.updated:
                return traced
        except ValueError:
            if needed:
                raise
    refuse_updating_copies(module, shape, communicator, strategy.name)
    return Untraced(module)
