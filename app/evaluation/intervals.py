"""Numbers with their intervals: bootstrap resamples over patients (Efron 1979, percentiles).

Takes who each case belongs to and a measure of any choice of cases; returns an ``Estimate``. Patients are drawn, not
cases, since the slides of one patient resemble each other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from app.training.metrics import rows_by

RESAMPLES = 1000
CONFIDENCE = 0.95

Rows = NDArray[np.int64]


@dataclass(frozen=True)
class Estimate:
    """A number with its interval; None where the cases cannot define it."""

    value: float | None
    low: float | None = None
    high: float | None = None


def bootstrap(patient: Rows, measure: Callable[[Rows], float | None], seed: int = 0) -> Estimate:
    """Return ``measure`` of all cases, and its ``CONFIDENCE`` interval over ``RESAMPLES`` draws of patients with
    replacement; draws that cannot define it, as those of one class alone, are not counted.

    Args:
        patient: (n,) number of each case's patient.
        measure: of the cases with these numbers, which may come several times.
    """
    value = measure(np.arange(len(patient)))
    if value is None:
        return Estimate(None)
    random = np.random.default_rng(seed)
    patients, rows = rows_by(patient)
    drawn = []
    for _ in range(RESAMPLES):
        picked = random.integers(len(patients), size=len(patients))
        of_draw = measure(np.concatenate([rows[k] for k in picked]))
        if of_draw is not None:
            drawn.append(of_draw)
    if not drawn:
        return Estimate(value)
    low, high = np.quantile(drawn, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return Estimate(value, float(low), float(high))
