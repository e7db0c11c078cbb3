"""Summing a stage's gradients over all ranks that hold a copy of it: in flat buckets, begun as early as they are ready.

Gradients are views into the buckets, so that backward adds into them in place and a bucket is summed without copying.
The buckets stand in reverse order of the parameters, which is about the order in which backward completes them (Li et
al. 2020, PyTorch Distributed, section 3.2).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator

from torch import Tensor, nn

from parallel.comm.communicator import Communicator, Work
from parallel.comm.gradient_buckets import Bucket, bucketed
from parallel.comm.sent_bytes import sum_bytes
from parallel.schedule.action import Action, Kind


class GradReducer:
    """The gradients of one stage and the other ranks that hold it.

    Args:
        parameters: of the stage; all dense.
        communicator: the ranks that hold a copy, this one among them.
        overlap: sum while the last backward pass still runs; not where gradients of parameters come after it.
        bucket_bytes: of gradients summed at once; 0: all of one dtype; None: ``BUCKET_BYTES``.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        communicator: Communicator,
        *,
        overlap: bool,
        bucket_bytes: int | None = None,
    ) -> None:
        self._communicator = communicator
        needed = [p for p in parameters if p.requires_grad]
        self.buckets = [Bucket(group) for group in bucketed(needed, bucket_bytes)]
        self._works: list[Work] = []
        self._armed = False
        self._overlap = overlap
        for place, bucket in enumerate(self.buckets):
            for number, parameter in enumerate(bucket.parameters):
                hook = _hook(weakref.ref(self), place, number)
                parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    @property
    def sent_bytes(self) -> int:
        """That this rank sends in a step."""
        return sum(sum_bytes(bucket.flat.nbytes, self._communicator.world) for bucket in self.buckets)

    def begin_step(self) -> None:
        """Zero the gradients."""
        assert not self._works
        self._armed = False
        for bucket in self.buckets:
            bucket.clear()

    def arm(self) -> None:
        """The next backward pass is the stage's last of this step: each bucket is summed as soon as it is complete."""
        self._armed = self._overlap
        for bucket in self.buckets:
            bucket.missing = len(bucket.parameters)

    def begin(self) -> None:
        """Begin to sum what has not been begun. Every rank that holds the stage comes here in the same order."""
        self._armed = False
        for bucket in self.buckets[len(self._works) :]:
            self._sum(bucket)

    def finish(self) -> None:
        """Wait for the sums."""
        for work in self._works:
            work.wait()
        self._works = []
        for bucket in self.buckets:
            bucket.settle()

    def _added(self, place: int, number: int) -> None:
        """A gradient was added to parameter ``number`` of bucket ``place``."""
        bucket = self.buckets[place]
        bucket.touched.add(number)
        if not self._armed:
            return
        bucket.missing -= 1
        # In the order of the buckets, which is the same on every rank.
        while len(self._works) < len(self.buckets) and self.buckets[len(self._works)].missing == 0:
            self._sum(self.buckets[len(self._works)])

    def _sum(self, bucket: Bucket) -> None:
        bucket.count()
        self._works.append(self._communicator.iall_reduce(bucket.flat))


def _hook(reducer: weakref.ref[GradReducer], place: int, number: int) -> Callable[[Tensor], None]:
    """A parameter's hook is out of the garbage collector's sight: holding the reducer, which holds the parameter, it
    would keep both for ever."""

    def added(_: Tensor) -> None:
        owner = reducer()
        if owner is not None:
            owner._added(place, number)

    return added


def completing_backwards(actions: tuple[Action, ...]) -> Iterator[int]:
    """Positions of the backward passes after which nothing but messages comes before the stage's REDUCE: its gradients
    can be summed while it still runs, without overtaking the sum of another stage."""
    computing: int | None = None
    for position, action in enumerate(actions):
        if action.kind is Kind.REDUCE:
            if computing is not None and actions[computing].stage == action.stage:
                yield computing
            computing = None
        elif action.kind is Kind.BACKWARD:
            computing = position
        elif action.kind in (Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT, Kind.RECOMPUTE):
            computing = None


def last_backwards(actions: tuple[Action, ...]) -> Iterator[int]:
    """Positions of the backward passes that are their stage's last: gradients that stay on this rank are final as soon
    as one adds to them. None of a stage with gradients of parameters that come after backward passes."""
    split = {action.stage for action in actions if action.kind is Kind.BACKWARD_WEIGHT}
    whole = ((a.stage, position) for position, a in enumerate(actions) if a.kind is Kind.BACKWARD)
    yield from sorted({stage: position for stage, position in whole if stage not in split}.values())
