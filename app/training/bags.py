"""One training step on bags of tiles (``--bag``), whose loss is of all tiles of a bag together.

The gradient of a bag's loss by the outputs of one tile depends on the outputs of all. So a step computes all outputs
first, keeping nothing else of the forward passes; then the loss of each bag and its gradients by these outputs; then it
trains on every microbatch as usual, with a loss that has these gradients. The activations of one microbatch are held at
a time, however large a bag is (Gao et al. 2021, "Scaling deep contrastive learning batch size", section 3).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from app.training.session import Session
from models.bag import BagLoss, bag_logits
from parallel.comm.communicator import Communicator
from parallel.engine.engine import Engine
from parallel.engine.step import Microbatch, NonFiniteLoss, StepResult

Step = Callable[[Callable[[], Iterable[Microbatch]], int, float], StepResult]
"""(microbatches of the engine's share, called once or more; number of the step; learning rate) -> its result."""


def steps_of(session: Session) -> Step:
    """Return what trains on a batch: the engine, or bags of tiles through it."""
    engine, loss = session.engine, session.loss
    if not isinstance(loss, BagLoss):
        return lambda microbatches, step, learning_rate: engine.step(microbatches(), step, learning_rate)
    assert isinstance(engine, Engine), "the settings refuse fsdp"
    bag, classes = session.config.stream.bag, len(session.dataset.classes)
    bags = BagSteps(engine, loss, session.placement.communicator, size=bag, classes=classes, ranges=session.ranges)
    return bags.step


class BagSteps:
    """Steps of ``engine``, whose model gives logits and an attention score for each tile.

    Args:
        engine: its loss is ``BagGradient``.
        loss: of bags.
        size: tiles of a bag.
        classes: of the task.
        ranges: tiles of the global batch in each microbatch, over all ranks.
    """

    def __init__(
        self,
        engine: Engine,
        loss: BagLoss,
        communicator: Communicator,
        *,
        size: int,
        classes: int,
        ranges: Sequence[range],
    ) -> None:
        self._engine, self._loss, self._communicator = engine, copy.deepcopy(loss).cpu(), communicator
        self._size, self._classes, self._ranges = size, classes, ranges

    def step(self, microbatches: Callable[[], Iterable[Microbatch]], step: int, learning_rate: float) -> StepResult:
        """Train on one global batch.

        Args:
            microbatches: returns those of the engine's share, in order; called twice.

        Raises:
            NonFiniteLoss: on every rank alike, before anything was updated.
        """
        loss, gradients = self._gradients(microbatches(), step)
        result = self._engine.step(self._with_gradients(microbatches(), gradients), step, learning_rate)
        return replace(result, loss=loss)

    def _gradients(self, microbatches: Iterable[Microbatch], step: int) -> tuple[float, Tensor]:
        """Return the mean loss over bags, and what ``BagGradient`` takes for each tile, float64 (batch, C + 1)."""
        tiles = self._ranges[-1].stop
        table = torch.zeros((tiles, self._classes + 2), dtype=torch.float64)  # the last column has labels
        for i, output, labels in self._engine.outputs(microbatches, step):
            part = self._ranges[i]
            rows = table[part.start : part.stop]
            rows[:, :-1], rows[:, -1] = output.double().cpu(), labels.double().cpu()
        self._communicator.all_reduce(table)  # each row was written by one rank
        bags = table.view(-1, self._size, self._classes + 2)
        outputs, labels = bags[..., :-1].requires_grad_(), bags[:, 0, -1].long()
        losses = self._loss.of_items(bag_logits(outputs), labels)
        loss = losses.mean()
        value = float(loss.detach())
        if not math.isfinite(value):
            faulty = (~losses.isfinite()).repeat_interleave(self._size).tolist()
            numbers = [i for i, part in enumerate(self._ranges) if any(faulty[part.start : part.stop])]
            raise NonFiniteLoss(numbers, [value] * len(numbers))
        (gradients,) = torch.autograd.grad(loss, outputs)
        return value, gradients.reshape(tiles, -1) * tiles  # the engine takes the mean over tiles

    def _with_gradients(self, microbatches: Iterable[Microbatch], gradients: Tensor) -> Iterator[Microbatch]:
        """Yield ``microbatches`` with gradients by outputs in place of labels."""
        for i, microbatch in zip(self._engine.share, microbatches, strict=True):
            part, targets = self._ranges[i], microbatch.targets
            if targets is not None:
                targets = gradients[part.start : part.stop].to(targets.device)
            yield microbatch._replace(targets=targets)
