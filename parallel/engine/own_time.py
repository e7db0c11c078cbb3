"""Seconds that a rank computes by itself, apart from those it waits for gradients of others.

Takes the parameters of a replica; gives the time of each of a step's microbatches, and the wait after the last. The
backward pass of the last microbatch of a step ends with the sums over ranks, so its own end is the moment in which
the last of the parameters has its gradient.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from parallel.comm.grad_reducer import on_gradient
from parallel.engine.device_clock import DeviceClock, Mark
from parallel.engine.step import Microbatch


class OwnTime:
    """A stopwatch of one rank's microbatches.

    Args:
        parameters: of the replica; those that need gradients tell when they have them. On a GPU that moment is not
            known, and what follows from it is left out.
        device: that computes.
        together: ranks wait for each other within every pass, so that no time is a rank's own.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], device: torch.device, together: bool = False) -> None:
        self._together = together
        self._clock = DeviceClock(device)
        self._begun: Mark = None
        self._ready: Mark = None
        self._ended: Mark = None
        self._computed: list[tuple[int, Mark, Mark]] = []
        self._wait: tuple[Mark, Mark] | None = None
        for parameter in parameters:
            if parameter.requires_grad and device.type == "cpu":
                on_gradient(parameter, self._tell)

    def begin_step(self) -> None:
        self._computed, self._wait = [], None
        self._ended = self._clock.mark()

    def begun(self, microbatch: Microbatch) -> Microbatch:
        """Return ``microbatch``, whose computing begins now."""
        self._ready, self._begun = None, self._clock.mark()
        return microbatch

    def end(self, i: int, summed: bool = False) -> None:
        """Microbatch ``i`` is computed.

        Args:
            summed: and its backward pass has summed the gradients of all over the ranks.
        """
        self._ended = self._ready if summed else self._clock.mark()
        if self._together or self._ended is None:
            return
        self._computed.append((i, self._begun, self._ended))
        if summed:
            self.summed()

    def summed(self) -> None:
        """The gradients of all are summed over the ranks."""
        self._wait = self._ended, self._clock.mark()

    @property
    def seconds(self) -> tuple[tuple[int, float], ...]:
        """Microbatches of the step so far, and seconds from ``begun`` to the end of each one's own computing."""
        seconds = self._clock.durations([(begun, ended) for _, begun, ended in self._computed])
        return tuple((i, each) for (i, _, _), each in zip(self._computed, seconds, strict=True))

    @property
    def waited_s(self) -> float | None:
        """Seconds from there to ``end`` of the step's last; None where they are not known."""
        return None if self._wait is None else self._clock.durations([self._wait])[0]

    def _tell(self) -> None:
        self._ready = self._clock.mark()
