"""What the training loop asks of whoever computes a step: the seam between a strategy and everything else.

Takes the microbatches of this rank; gives the loss of the whole global batch. The loop does not know how many ranks,
stages or replicas stand behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

Loss = Callable[[Tensor, Tensor], Tensor]
"""(output, targets) -> scalar: the mean over the tiles of a microbatch, so that microbatch losses add up by size."""


class NonFiniteLoss(ArithmeticError):
    """A loss that is NaN or infinite. Parameters and optimizer are as they were before the step.

    Attributes:
        microbatches: which of the step's microbatches, over all ranks, were not finite.
        losses: their values.
    """

    def __init__(self, microbatches: list[int], losses: list[float]) -> None:
        super().__init__(f"loss {losses} in microbatches {microbatches}")
        self.microbatches = microbatches
        self.losses = losses


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step leaves to report: the mean loss over the global batch, and the tiles this rank trained on."""

    loss: float
    tiles: int


class Engine(Protocol):
    """One optimiser step of a model over a fixed group of ranks."""

    module: nn.Module
    """The model whose parameters the checkpoint keeps, under the names its author gave them."""

    def step(self, microbatches: Iterable[tuple[Tensor, Tensor]], step: int, learning_rate: float) -> StepResult:
        """Forward, backward and update on one global batch.

        Args:
            microbatches: (images (n, 3, h, w), targets) of this rank, in order; drawn lazily, one in memory at a time.
            step: number of the step, from 0; seeds the random numbers of each microbatch.
            learning_rate: for this update.

        Raises:
            NonFiniteLoss: on every rank alike, before anything was updated.
        """
        ...

    def predict(self, images: Tensor) -> Tensor:
        """Output of the model in evaluation mode, float32, without gradients."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Parameters, buffers and optimizer state, the same whatever the strategy."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...

    def close(self) -> None:
        """Let go of the communicator. No step can follow."""
        ...


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
