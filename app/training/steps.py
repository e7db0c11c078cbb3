"""Tiles of one step after the other, as this rank prefetches them, and training on bags of tiles (``--bag``).

All state of reading is here: the position in the stream, what was made ahead, whether ranks still have to exchange
replaced tiles, and which rank reads what. The gradient of a bag's loss by the outputs of one tile depends on the
outputs of all. So a step on bags computes all outputs first, keeping nothing else of the forward passes; then the loss
of each bag and its gradients by these outputs; then it trains on every microbatch as usual, with a loss that has these
gradients. The activations of one microbatch are held at a time, however large a bag is (Gao et al. 2021, "Scaling deep
contrastive learning batch size", section 3).
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from app.training.batches import microbatches_of
from app.training.session import Session
from models.heads import BagLoss, bag_logits
from parallel.comm.communicator import Communicator
from parallel.engine.engine import Engine
from parallel.engine.step import Microbatch, NonFiniteLoss, StepResult
from parallel.schedule.shares import Shares
from pipelines.stream.batch import Batch

Step = Callable[[Callable[[], Iterable[Microbatch]], int, float], StepResult]
"""(microbatches of the engine's share, called once or more; number of the step; learning rate) -> its result."""


class TrainLoader:
    """Batches of a run on one rank; to be closed, which ends prefetching.

    Args:
        thread_context: entered by the thread that prefetches microbatches, as for ``DevicePrefetcher``.
        state: of the stream where the run continues, as ``state`` gave it; None: from its beginning.
    """

    def __init__(
        self,
        session: Session,
        thread_context: Callable[[], AbstractContextManager[object]],
        state: dict[str, Any] | None,
    ) -> None:
        self._session = session
        self._thread_context = thread_context
        self._stream, self._reading = session.stream, session.reading
        self._open(state)

    def _open(self, state: dict[str, Any] | None) -> None:
        self._tiles = iter(self._stream)
        if state is not None:
            self._tiles.set_state(state)
        self._feed = self._session.feed(self._tiles, self._tiles.ready, self._thread_context)
        self._unsettled = True

    def next(self) -> Batch:
        """Return this rank's part of the next global batch, the same tiles on all ranks that have parts of them."""
        batch = next(self._feed)
        if self._unsettled and self._reading.settle(self._tiles, batch):
            self._feed.invalidate(batch)
        return batch

    def microbatches(self, batch: Batch) -> Iterable[Microbatch]:
        """Return the microbatches of a step on ``batch``."""
        return microbatches_of(self._feed, batch, self._reading.sizes, self._reading.counts)

    def replaced(self, batch: Batch) -> int:
        """Return how many tiles that this rank counts in the step on ``batch`` replace one that cannot be read."""
        return batch.replaced * (self._session.engine.counted or self._reading.sizes != self._reading.counts)

    @property
    def needs_sync(self) -> bool:
        """Return whether this rank needs the next batch settled; after all answers, call ``sync_next``."""
        return self._reading.needs_sync(self._feed)

    def sync_next(self, asked: bool) -> None:
        """Record whether any rank has asked for it."""
        self._unsettled = asked

    def held(self) -> Iterator[torch.Tensor]:
        """Yield what is on the device for steps to come."""
        return self._feed.held()

    def state(self, step: int) -> dict[str, Any]:
        """Return where the stream is once ``step`` steps are done; more may be taken from it."""
        return {**self._tiles.get_state(), "batch": step}

    def reshare(self, shares: Shares, step: int) -> None:
        """Let groups train on and validate ``shares`` from step number ``step`` on, from 0. Every rank calls it."""
        session, state = self._session, self.state(step)
        self.close()
        session.engine.reshare(shares)
        share = session.engine.share
        ranges, wants = [session.ranges[i] for i in share], [session.engine.wants(i) for i in share]
        self._reading = replace(self._reading, ranges=ranges, wants=wants)
        wants = [session.engine.predict_wants] * len(share)
        session.validation_reading = replace(session.validation_reading, ranges=ranges, wants=wants)
        self._stream = self._reading.sharded(self._stream)
        self._open(state)

    def keep(self, batch: Batch) -> None:
        """Give ``batch``, held in memory, from now on, and read nothing."""
        self.close()
        self._feed = self._session.feed(itertools.repeat(batch), lambda: True, self._thread_context)
        self._unsettled = False

    def close(self) -> None:
        self._feed.close()
        self._tiles.close()


def steps_of(session: Session) -> Step:
    """Return what trains on a batch: the engine, or bags of tiles through it."""
    engine, loss = session.engine, session.loss
    if not isinstance(loss, BagLoss):
        return lambda microbatches, step, learning_rate: engine.step(microbatches(), step, learning_rate)
    assert isinstance(engine, Engine), "the settings refuse fsdp"
    dataset = session.dataset
    labels = torch.tensor([dataset.slide_labels[slide_id] for slide_id in dataset.tiles.slides])
    bags = BagSteps(
        engine,
        loss,
        session.placement.communicator,
        size=session.config.stream.bag,
        classes=len(dataset.classes),
        labels=labels,
        drawn=lambda step: torch.from_numpy(dataset.tiles.slide[session.rows_of_step(step)]),
        ranges=session.ranges,
    )
    return bags.step


class BagSteps:
    """Steps of ``engine``, whose model gives logits and an attention score for each tile.

    Of a slide that cannot be read, tiles of another take the place. A step leaves a bag with such tiles out; without
    any other its loss is 0, and so are the gradients.

    Args:
        engine: its loss is ``BagGradient``.
        size: tiles of a bag.
        labels: int64 (slides,), class of each slide; targets of microbatches are numbers of slides.
        drawn: takes a step, returns the numbers of the slides that its tiles were drawn of, (batch,).
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
        labels: Tensor,
        drawn: Callable[[int], Tensor],
        ranges: Sequence[range],
    ) -> None:
        self._engine, self._loss, self._communicator = engine, copy.deepcopy(loss).cpu(), communicator
        self._size, self._classes, self._labels, self._drawn, self._ranges = size, classes, labels, drawn, ranges

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
        table = torch.zeros((tiles, self._classes + 2), dtype=torch.float64)  # the last column has slides
        for i, output, slides in self._engine.outputs(microbatches, step):
            part = self._ranges[i]
            rows = table[part.start : part.stop]
            rows[:, :-1], rows[:, -1] = output.double().cpu(), slides.double().cpu()
        self._communicator.all_reduce(table)  # each row was written by one rank
        bags = table.view(-1, self._size, self._classes + 2)
        outputs, slides = bags[..., :-1].requires_grad_(), bags[..., -1].long()
        drawn = self._drawn(step).view(-1, self._size)
        whole = (slides == drawn).all(1)
        losses = self._loss.of_items(bag_logits(outputs), self._labels[drawn[:, 0]]) * whole
        loss = losses.sum() / whole.sum().clamp(min=1)
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
