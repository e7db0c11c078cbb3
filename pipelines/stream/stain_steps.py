"""Stain normalisation as what is done to a px: a matrix and a shift for each slide, applied where the model runs.

Takes how slides are stained (``StainFit``) and what they are to look like; gives, for rows of a table, ``StainSteps``.
Macenko's is a matrix on optical densities, which a jitter that follows is multiplied into; Reinhard's is a matrix and a
shift on the logarithms of L, M, S. White stays white, and a slide without a fit stays as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from pipelines.stream.augment import Draw
from pipelines.tiles.stain_fit import LAB_FROM_LOG_LMS, Method, StainFit

LOG_LMS_FROM_LAB = np.linalg.inv(LAB_FROM_LOG_LMS)


@dataclass(frozen=True, eq=False)
class StainSteps:
    """What is done to the px of each slide.

    Attributes:
        method: macenko: density' = density @ matrix, of R, G, B; reinhard: density' = density @ matrix + shift, of
            L, M, S. Densities are row vectors, -ln of light 0 to 1.
        matrix, shift: float64 (slides, 3, 3), (slides, 3).
        slide: number of the slide of each row of a table, int (n,).
    """

    method: Method
    matrix: NDArray[np.float64]
    shift: NDArray[np.float64]
    slide: NDArray[np.int32]

    @classmethod
    def of(
        cls, target: StainFit, fits: Sequence[StainFit | None], slide: NDArray[np.int32] | Sequence[int]
    ) -> StainSteps:
        """Return the steps from each of ``fits`` to ``target``.

        Args:
            fits: one for each slide; None: it stays as it is.
            slide: number of the slide of each row of a table.
        """
        steps = [(np.eye(3), np.zeros(3)) if fit is None else _step(fit, target) for fit in fits]
        matrices, shifts = zip(*steps, strict=True)
        return cls(target.method, np.stack(matrices), np.stack(shifts), np.asarray(slide, np.int32))

    def before(self, drawn: Draw, rows: NDArray[np.int64]) -> Draw:
        """Return ``drawn`` with the normalisation of the tiles ``rows`` before it."""
        slides = self.slide[rows]
        matrix, shift = self.matrix[slides], self.shift[slides].astype(np.float32)
        if self.method == "reinhard":
            return replace(drawn, lms=(matrix.astype(np.float32), shift))
        if drawn.matrix is None or drawn.shift is None:
            return replace(drawn, matrix=matrix.astype(np.float32), shift=shift)
        return replace(drawn, matrix=(matrix @ drawn.matrix).astype(np.float32))


def _step(fit: StainFit, target: StainFit) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Matrix and shift on densities as row vectors."""
    assert fit.method == target.method
    if fit.method == "macenko":
        factors = np.diag(target.amounts / fit.amounts)
        return np.linalg.pinv(fit.stains) @ factors @ target.stains, np.zeros(3)
    scale = target.spread / fit.spread
    # lab' = (lab - mean) * scale + target mean, where lab = -density @ LAB_FROM_LOG_LMS.T
    matrix = LAB_FROM_LOG_LMS.T @ np.diag(scale) @ LOG_LMS_FROM_LAB.T
    return matrix, -(target.mean - fit.mean * scale) @ LOG_LMS_FROM_LAB.T
