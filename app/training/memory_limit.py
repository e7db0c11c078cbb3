"""``--memory`` of a run: on a GPU the allocator keeps to it, on a CPU the first steps are checked against it.

Takes the limit and the device of a rank; gives the bytes that a device would have held, and what to say of them. A CPU
has no memory of its own to run out of, so its tensors are counted (``parallel.offload.live_bytes``); unless asked to
stop as a GPU would, a run that takes more is only warned of.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from parallel.offload.live_bytes import LiveBytes
from parallel.units import bytes_text

CHECKED = 2
"""Steps that are counted on a CPU: the second has the optimizer's state and all gradients. They are those that speed
figures leave out as a warm-up."""
HELP = (
    "lower --tile, raise --microbatches, or use --stream 512, --recompute block, --offload overlap or --precision bf16"
)


class MemoryLimit:
    """Memory limit of one rank.

    Args:
        limit: bytes that it may take; None: as many as there are.
        counts: count on a CPU; not compiled stages, which what watches every operation would keep from being compiled.
        stops: on a CPU, fail where a GPU of that size would.
    """

    def __init__(self, limit: int | None, device: torch.device, *, counts: bool = True, stops: bool = False) -> None:
        self.limit = limit
        self._stop_at = limit if stops else None
        self._device = device
        self._left = CHECKED if device.type == "cpu" and counts else 0
        self._live: LiveBytes | None = None
        self._peak: int | None = None

    def impose(self) -> None:
        """Let allocations beyond the limit fail on a GPU."""
        if self.limit is not None and self._device.type == "cuda":
            total = torch.cuda.get_device_properties(self._device).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, self.limit / total), self._device)

    @contextlib.contextmanager
    def watching(self, held: Iterable[Tensor]) -> Iterator[None]:
        """Around a step.

        Args:
            held: what is on the device already.
        """
        if not self._left:
            yield
            return
        self._left -= 1
        self._live = live = LiveBytes(self._stop_at)
        try:
            live.add(held)
            with live:
                yield
        finally:
            self._live = None
            self._peak = max(self._peak or 0, live.peak_bytes)

    @contextlib.contextmanager
    def beside(self) -> Iterator[None]:
        """Around what another thread makes on the device for the steps: it counts in a step that is watched."""
        live = self._live
        with live.on_other_thread() if live is not None else contextlib.nullcontext():
            yield

    @property
    def device_bytes(self) -> int | None:
        """The most that tensors took on the device at a time; None where that was not counted."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        return self._peak

    def fault(self) -> str:
        """Return the error message when a device has no memory left."""
        within = f" within --memory {bytes_text(self.limit)}" if self.limit is not None else ""
        return f"out of memory on {self._device}{within}: {HELP}; `python -m app.plan --largest-tile` says what fits"


def excess(limit: int | None, device_bytes: Sequence[int | None]) -> str:
    """A warning about the ranks that took more than ``limit``; empty where none did.

    Args:
        device_bytes: by rank.
    """
    over = {rank: size for rank, size in enumerate(device_bytes) if limit is not None and (size or 0) > limit}
    if limit is None or not over:
        return ""
    ranks = ", ".join(f"rank {rank} {bytes_text(size or 0)}" for rank, size in over.items())
    return (
        f"--memory allows {bytes_text(limit)} a rank, and tensors took more on {len(over)} of "
        f"{len(device_bytes)}: {ranks}. A device of that size could not train this: {HELP}"
    )
