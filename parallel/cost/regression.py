"""Polynomials that predict the time of an operation from its shape.

The logarithm of the ratio of measured seconds to what the operation would take at the device's best is a polynomial in
the features of its shape, by ridge regression, with its degree and the strength of the penalty found by
cross-validation (Pedregosa et al., Scikit-learn, JMLR 2011). Beyond the shapes it has seen it is constant, so that time
goes in proportion to the work. scikit-learn is needed to fit it, numpy to use it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

PENALTIES = (1e-3, 1e-2, 1e-1, 1.0, 10.0, 100.0)
FOLDS, ENOUGH = 5, 15
DEGREES = (1, 2)


@dataclass(frozen=True)
class Polynomial:
    """log(ratio) = intercept + coefficients . monomials of the features, each scaled to [-1, 1] and bounded there."""

    low: tuple[float, ...]
    high: tuple[float, ...]
    powers: tuple[tuple[int, ...], ...]
    coefficients: tuple[float, ...]
    intercept: float

    def __call__(self, features: Sequence[Sequence[float]]) -> Floats:
        """The ratio, for each row."""
        scaled = _unit(np.asarray(features, float), np.asarray(self.low), np.asarray(self.high))
        powers = np.asarray(self.powers, int).reshape(-1, scaled.shape[1])
        monomials = np.prod(scaled[:, None, :] ** powers[None], axis=2)
        ratios: Floats = np.exp(self.intercept + monomials @ np.asarray(self.coefficients, float))
        return ratios

    @staticmethod
    def from_dict(data: dict[str, Any]) -> Polynomial:
        """Return the polynomial from what ``asdict`` gives, through JSON or not."""
        numbers = {name: tuple(data[name]) for name in ("low", "high", "coefficients")}
        return Polynomial(**numbers, powers=tuple(map(tuple, data["powers"])), intercept=data["intercept"])


def fit(features: Sequence[Sequence[float]], ratios: Sequence[float]) -> tuple[Polynomial, list[float]]:
    """A polynomial, and the relative errors of its like on rows that were left out of fitting.

    Args:
        features: rows; fewer than ``ENOUGH`` give a constant, the median.
        ratios: measured over best possible seconds, positive.
    """
    from sklearn.model_selection import KFold, cross_val_predict

    x, y = np.asarray(features, float), np.log(np.asarray(ratios, float))
    low, high = x.min(0), x.max(0)
    if len(y) < ENOUGH:
        middle = float(np.median(y))
        constant = Polynomial(tuple(low.tolist()), tuple(high.tolist()), (), (), middle)
        return constant, np.abs(np.exp(middle - y) - 1).tolist()
    varied = np.flatnonzero(high > low)
    x = _unit(x, low, high)[:, varied]
    folds = KFold(FOLDS, shuffle=True, random_state=0)
    left_out = {
        degree: np.abs(np.exp(cross_val_predict(_pipeline(degree), x, y, cv=folds) - y) - 1)
        for degree in DEGREES
        if degree == 1 or math.comb(len(varied) + degree, degree) <= len(y)
    }
    # The mean of errors capped at 1: what is usual counts, and no single shape decides.
    degree = min(left_out, key=lambda degree: float(np.minimum(left_out[degree], 1.0).mean()))
    expand, ridge = _pipeline(degree).fit(x, y)
    powers = np.zeros((len(expand.powers_), len(low)), int)
    powers[:, varied] = expand.powers_
    polynomial = Polynomial(
        tuple(low.tolist()),
        tuple(high.tolist()),
        tuple(map(tuple, powers.tolist())),
        tuple(ridge.coef_.tolist()),
        float(ridge.intercept_),
    )
    return polynomial, left_out[degree].tolist()


def _pipeline(degree: int) -> Any:
    from sklearn.linear_model import RidgeCV
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import PolynomialFeatures

    return make_pipeline(PolynomialFeatures(degree, include_bias=False), RidgeCV(PENALTIES))


def _unit(x: Floats, low: Floats, high: Floats) -> Floats:
    bounded: Floats = 2 * (np.clip(x, low, high) - low) / np.maximum(high - low, 1e-9) - 1
    return bounded
