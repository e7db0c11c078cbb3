"""Policy for saved activations, as a user or a planner chooses it: keep, recompute or offload. No torch here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Offload = Literal["none", "overlap"]
Recompute = Literal["none", "stage", "block", "optimal"]

MIB = 1 << 20
SMALLEST = MIB
"""Bytes below which a tensor is left on the device: moving it takes longer than it is worth."""
WINDOW = 2
"""Largest storages that the window of offloading holds on a GPU: one is copied while the next is computed."""


STEPS = 8
"""Sizes of host buffers between one power of two and the next; a ninth is wasted at most."""
LEAST = 4096
"""Bytes of the smallest host buffer, a page."""


def buffer_bytes(size: int) -> int:
    """Return the bytes of the host buffer that ``size`` bytes are moved to."""
    step = max(LEAST, (1 << max(0, size.bit_length() - 1)) // STEPS)
    return -(-size // step) * step


@dataclass(frozen=True, slots=True)
class Segment:
    """Layers at positions ``start`` to ``stop``, not included, of the model's graph.

    Attributes:
        recompute: nothing is kept of them but what enters; they are computed again before their backward pass.
    """

    start: int
    stop: int
    recompute: bool


@dataclass(frozen=True)
class ActivationPolicy:
    """Policy for what the forward passes of a rank save.

    Attributes:
        recompute: "none"; "stage": nothing is kept but what enters a stage; "block": what enters a block of the model
            (``blocks``); "optimal": what enters the runs of ``chosen``, which a planner finds.
        chosen: names of the first and last layer of each run of layers that is computed again.
        offload: what is kept is moved to the host.
        ahead: bytes of activations that offloading leaves on the device, or brings back ahead of their use; of all
            stages of a rank together. None: ``WINDOW`` times the largest storage that the rank has saved.
        smallest: bytes of a tensor that is worth moving.
        optimizer: its state and its step are on the host.
        parameters: they are, too, and come to the device layer by layer; implies ``optimizer``.
        stream: side in px of the boxes that a tile is computed in, one after the other; None: at once.
        host_bytes: that a rank may take on the host; what does not fit there stays on the device. None: no limit.
    """

    recompute: Recompute = "none"
    chosen: tuple[tuple[str, str], ...] = ()
    offload: Offload = "none"
    ahead: int | None = 0
    smallest: int = SMALLEST
    host_bytes: int | None = None
    optimizer: bool = False
    parameters: bool = False
    stream: int | None = None

    def __post_init__(self) -> None:
        assert self.recompute == "optimal" or not self.chosen, self.chosen

    @property
    def stagewise(self) -> bool:
        """Stages are computed again as a whole, which their schedule shows."""
        return self.recompute == "stage"

    @property
    def segmented(self) -> bool:
        """Parts of a stage are computed again within its backward pass."""
        return bool(self.chosen) if self.recompute == "optimal" else self.recompute not in ("none", "stage")

    @property
    def moves(self) -> bool:
        """Saved activations are offloaded to the host."""
        return self.offload != "none"

    @property
    def saves(self) -> bool:
        """Takes time to need less memory for what is kept."""
        return self.recompute != "none" or self.moves

    @property
    def state(self) -> Literal["none", "optimizer", "parameters"]:
        """What is on the host besides activations, as ``--offload-state`` names it."""
        return "parameters" if self.parameters else "optimizer" if self.optimizer else "none"


KEEP_ALL = ActivationPolicy()
"""On the device, all of it."""
