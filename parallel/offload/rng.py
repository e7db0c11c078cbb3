"""Random numbers of a stage: dropout draws what the plain model draws.

The plain step seeds torch before each microbatch and draws through the model in order. The first stage that draws is
given that seed; each later one continues from the state the one before it ended with, sent along as one uint8 tensor.
A recomputed forward pass starts again where the first one started. Layers of users may also draw from the generators of
``random`` and ``numpy.random``: these are seeded, sent along and kept with torch's.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from parallel.trace.python_random import STATE_BYTES, python_state, seed_python, set_python_state

DRAWING = threading.RLock()
"""Held while a stage draws: ranks that are threads of one process share the default generators."""


class Draws:
    """The random numbers of one forward pass; ``end``, the state after them, is there once the block is left."""

    end: Tensor


@contextmanager
def drawing(start: int | Tensor, device: torch.device) -> Iterator[Draws]:
    """Draw from ``start`` on within the block, alone in this process.

    Afterwards the generators are as they were before the block, so neither the program around a stage nor another
    stage sees that it drew. What is drawn between steps therefore needs a generator of its own.

    Args:
        start: a seed, or the state that an earlier pass ended with.
        device: of the stage; its generator is set besides those of the CPU.
    """
    draws = Draws()
    with DRAWING:
        before = get_random_state(device)
        try:
            if isinstance(start, Tensor):
                set_random_state(start, device)
            else:
                seed_python(start)
                for generator in _generators(device):  # other threads may be using other devices
                    generator.manual_seed(start)
            yield draws
            draws.end = get_random_state(device)
        finally:
            set_random_state(before, device)


def get_random_state(device: torch.device) -> Tensor:
    """Return the states of the default generators of torch, Python and NumPy: uint8 (bytes,)."""
    states = [generator.get_state() for generator in _generators(device)]
    return torch.cat([*states, torch.frombuffer(bytearray(python_state()), dtype=torch.uint8)])


def set_random_state(state: Tensor, device: torch.device) -> None:
    """Bring the generators to ``state``, which ``get_random_state`` gave for a device of the same kind.

    Raises:
        ValueError: ``state`` has another size or type, as when the stages' devices are of different kinds.
    """
    sizes = _sizes(device)
    if state.dtype != torch.uint8 or state.shape != (sum(sizes),):
        raise ValueError(
            f"a random state for {device} is {sum(sizes)} bytes of uint8, got {tuple(state.shape)} of {state.dtype}: "
            "put all stages that draw on devices of one kind"
        )
    *own_states, python = torch.split(state.cpu(), sizes)
    set_python_state(python.numpy().tobytes())
    for generator, own_state in zip(_generators(device), own_states, strict=True):
        generator.set_state(own_state.clone())


def _sizes(device: torch.device) -> list[int]:
    return [*(generator.get_state().numel() for generator in _generators(device)), STATE_BYTES]


def _generators(device: torch.device) -> list[torch.Generator]:
    if device.type != "cuda":
        return [torch.default_generator]
    torch.cuda.init()  # type: ignore[no-untyped-call]
    index = torch.cuda.current_device() if device.index is None else device.index
    return [torch.default_generator, torch.cuda.default_generators[index]]
