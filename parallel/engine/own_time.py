"""Seconds that a rank computes by itself, apart from those it waits for gradients of others.

Takes the parameters of a replica; gives the time of each of a step's microbatches, and the wait after the last. The
backward pass of the last microbatch of a step ends with the sums over ranks, so its own end is the moment in which
the last of the parameters has its gradient.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable

from torch import Tensor, nn

from parallel.engine.step import Microbatch


class OwnTime:
    """A stopwatch of one rank's microbatches.

    Args:
        parameters: of the replica; those that need gradients tell when they have them. On a device that computes
            behind the host's back that moment is not known, and what follows from it is left out.
        together: ranks wait for each other within every pass, so that no time is a rank's own.

    Attributes:
        seconds: of the step so far: microbatch and seconds from ``begun`` to the end of its own computing.
        waited_s: from there to ``end`` of the step's last; None where it is not known.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], together: bool = False) -> None:
        self._together = together
        self.seconds: list[tuple[int, float]] = []
        self.waited_s: float | None = None
        self._begun_s = self._ready_s = self._ended_s = 0.0
        hook = _told(weakref.ref(self))
        for parameter in parameters:
            if parameter.requires_grad and not parameter.is_cuda:
                handle = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
                weakref.finalize(self, handle.remove)

    def begin_step(self) -> None:
        self.seconds, self.waited_s = [], None
        self._ended_s = time.perf_counter()

    def begun(self, microbatch: Microbatch) -> Microbatch:
        """Return ``microbatch``, whose computing begins now."""
        self._ready_s, self._begun_s = 0.0, time.perf_counter()
        return microbatch

    def end(self, i: int, summed: bool = False) -> None:
        """Microbatch ``i`` is computed.

        Args:
            summed: and its backward pass has summed the gradients of all over the ranks.
        """
        self._ended_s = self._ready_s if summed else time.perf_counter()
        if self._together or not self._ended_s:
            return
        self.seconds.append((i, self._ended_s - self._begun_s))
        if summed:
            self.summed()

    def summed(self) -> None:
        """The gradients of all are summed over the ranks."""
        self.waited_s = time.perf_counter() - self._ended_s

    def _tell(self) -> None:
        self._ready_s = time.perf_counter()


def _told(owner: weakref.ref[OwnTime]) -> Callable[[Tensor], None]:
    """A hook that does not keep the stopwatch alive: parameters outlive it."""

    def tell(_: Tensor) -> None:
        watch = owner()
        if watch is not None:
            watch._tell()

    return tell
