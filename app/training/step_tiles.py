"""The tiles of one step after the other, as this rank reads them ahead.

Takes the session; gives a batch a step and its microbatches on the device. Here is all of reading that has state: where
the stream is, what was made ahead, whether ranks still have to settle what they read, and which rank reads what.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch

from app.training.batches import microbatches_of
from app.training.session import Session
from parallel.engine.step import Microbatch
from parallel.schedule.shares import Shares
from pipelines.stream.batch import Batch


class StepTiles:
    """Batches of a run on one rank; a context manager, at whose end nothing is read ahead any more.

    Args:
        session: the run's parts.
        beside: entered by the thread that makes microbatches ahead, as for ``DevicePrefetcher``.
        state: of the stream where the run continues, as ``state`` gave it; None: from its beginning.
    """

    def __init__(
        self, session: Session, beside: Callable[[], AbstractContextManager[object]], state: dict[str, Any] | None
    ) -> None:
        self._session = session
        self._beside = beside
        self._stream, self._reading = session.stream, session.reading
        self._open(state)

    def _open(self, state: dict[str, Any] | None) -> None:
        self._tiles = iter(self._stream)
        if state is not None:
            self._tiles.set_state(state)
        self._feed = self._session.feed(self._tiles, self._tiles.ready, self._beside)
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
        """Return whether this rank asks that the next batch be settled; after all answers, call ``sync_next``."""
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
        """Let groups compute and read ahead ``shares`` from step number ``step`` on, from 0. Every rank calls it."""
        session, state = self._session, self.state(step)
        self.close()
        session.engine.reshare(shares)
        share = session.engine.share
        wants = [session.engine.wants(i) for i in share]
        self._reading = self._reading.of_ranges([session.ranges[i] for i in share], wants)
        self._stream = self._reading.sharded(self._stream)
        self._open(state)

    def keep(self, batch: Batch) -> None:
        """Give ``batch``, held in memory, from now on, and read nothing."""
        self.close()
        self._feed = self._session.feed(itertools.repeat(batch), lambda: True, self._beside)
        self._unsettled = False

    def close(self) -> None:
        self._feed.close()
        self._tiles.close()

    def __enter__(self) -> StepTiles:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
