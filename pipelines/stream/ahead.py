"""What is done for the microbatches and batches to come while one is computed: in order, and no more than asked for.

``MicrobatchQueue`` has the parts of one batch made before they are asked for; ``AheadIterator`` hands a feed the next
batch as soon as it is read. How parts are made, and where, is the feed's business (``device.py``).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from types import TracebackType
from typing import Any, Generic, Protocol, Self, TypeVar

from pipelines.stream.batch import Batch
from pipelines.stream.iterator import TileIterator
from pipelines.stream.order import Rows

Part = TypeVar("Part")
Made = TypeVar("Made", covariant=True)


class Pending(Protocol[Made]):
    """A part that has been begun."""

    def take(self) -> Made:
        """The part, once it is made; asked again, the same.

        Raises:
            Exception: what making it raised.
        """
        ...

    def drop(self) -> None:
        """Return once nothing reads the batch for it any more; the part is not asked for."""
        ...


class WhenAsked(Generic[Part]):
    """A part that is made when it is taken, and so only once."""

    def __init__(self, make: Callable[[], Part]) -> None:
        self._make = make

    def take(self) -> Part:
        return self._make()

    def drop(self) -> None:
        """Nothing was begun."""


class OnThread(Generic[Part]):
    """A part that another thread makes."""

    def __init__(self, future: Future[Part]) -> None:
        self._future = future

    def take(self) -> Part:
        return self._future.result()

    def drop(self) -> None:
        if not self._future.cancel():
            wait([self._future])


class MicrobatchQueue(Generic[Part]):
    """The parts of one batch, begun and given in order.

    Args:
        sizes: tiles in each part.
        begin: begins the tiles of one part.
    """

    def __init__(self, sizes: Sequence[int], begin: Callable[[slice], Pending[Part]]) -> None:
        self.sizes = tuple(sizes)
        self._begin = begin
        self._next = 0  # part to be begun
        self._start = 0  # its first tile
        self._under_way: deque[Pending[Part]] = deque()

    def begin(self, parts: int) -> int:
        """Have ``parts`` of the parts not given yet under way; of fewer that are left, all.

        Returns:
            how many are under way.
        """
        while len(self._under_way) < parts and self._next < len(self.sizes):
            end = self._start + self.sizes[self._next]
            self._under_way.append(self._begin(slice(self._start, end)))
            self._next, self._start = self._next + 1, end
        return len(self._under_way)

    def give(self) -> Part:
        """The next part, held by nobody here any more; it was begun."""
        return self._under_way.popleft().take()

    def made(self) -> Iterator[Part]:
        """The parts under way, waited for; they are given later all the same."""
        for pending in self._under_way:
            yield pending.take()

    def drop(self) -> None:
        """Give up what is under way."""
        while self._under_way:
            self._under_way.popleft().drop()


class Receiver(Protocol):
    """Who is told of the next batch."""

    def send(self, batch: Batch) -> None:
        """Begin to work on ``batch`` before it is asked for."""
        ...

    def forget(self) -> None:
        """Stop that, and keep nothing of it."""
        ...


class AheadIterator:
    """A ``TileIterator`` that hands the next batch to a feed early; all else is the source's."""

    def __init__(self, feed: Receiver, source: TileIterator) -> None:
        self._feed = feed
        self._source = source
        self._next: Batch | None = None

    @property
    def wait_s(self) -> float:
        return self._source.wait_s

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        batch, self._next = self._next, None
        return next(self._source) if batch is None else batch

    def look(self) -> None:
        """Send the next batch when it can be had without waiting and is not on its way yet."""
        if self._next is None and self._source.ready():
            self._next = next(self._source)
            self._feed.send(self._next)

    def follow(self, batch: Batch, rows: Rows) -> None:
        """As of ``TileIterator``, before the ``microbatches`` of ``batch`` are asked for."""
        if self._source.follow(batch, rows):
            self._feed.forget()  # what was made early of this batch has the targets as they were

    def get_state(self) -> dict[str, Any]:
        """As of ``TileIterator``: a batch that was sent early but not asked for yet does not count as given."""
        state = self._source.get_state()
        return state if self._next is None else {**state, "batch": state["batch"] - 1}

    def set_state(self, state: dict[str, Any]) -> None:
        self._drop()
        self._source.set_state(state)

    def close(self) -> None:
        self._drop()
        self._source.close()

    def _drop(self) -> None:
        if self._next is not None:
            self._feed.forget()
            self._next.release()
            self._next = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
