"""The global generators of ``random`` and ``numpy.random``, from which layers may draw besides torch's."""

from __future__ import annotations

import math
import random
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

_STATE = struct.Struct("=625Id624I2Id")
"""Words and spare normal number of ``random``; keys, position, and spare normal number, if any, of ``numpy.random``."""
STATE_BYTES = _STATE.size


def python_state() -> bytes:
    """Return the states of both generators, always in ``STATE_BYTES``.

    Raises:
        ValueError: NumPy's was exchanged for one of another kind.
    """
    _, words, spare = random.getstate()
    drawn: Any = np.random.get_state(legacy=False)  # noqa: NPY002
    if drawn["bit_generator"] != "MT19937":
        raise ValueError(
            f"numpy.random draws from {drawn['bit_generator']}, whose state cannot be kept: leave out "
            "numpy.random.set_bit_generator, and use a Generator of your own"
        )
    kept = drawn["state"]["key"].tolist(), drawn["state"]["pos"], drawn["has_gauss"], drawn["gauss"]
    return _STATE.pack(*words, math.nan if spare is None else spare, *kept[0], *kept[1:])


def set_python_state(state: bytes) -> None:
    """Bring both generators to ``state``, which ``python_state`` gave."""
    values = _STATE.unpack(state)
    spare, keys = values[625], np.array(values[626:1250], np.uint32)
    random.setstate((3, values[:625], None if math.isnan(spare) else spare))
    drawn: Any = ("MT19937", keys, *values[1250:])
    np.random.set_state(drawn)  # noqa: NPY002


@contextmanager
def preserve_python_state() -> Iterator[None]:
    """Bring both generators back, at the end, to where they are now."""
    before = python_state()
    try:
        yield
    finally:
        set_python_state(before)


def seed_python(seed: int) -> None:
    """Seed both generators; NumPy's takes 32 bits."""
    random.seed(seed)
    np.random.seed(seed % (1 << 32))  # noqa: NPY002
