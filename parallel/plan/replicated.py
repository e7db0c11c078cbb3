"""The fastest partition into stages of which each may have several replicas, for gradients of single minibatches.

After PipeDream (Narayanan et al., SOSP 2019, section 3.1): minibatches go to the replicas of a stage in turn, so that a
stage of q replicas takes a q-th of its time for each. Nothing here is run: the engine has one rank a stage. No torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class ReplicatedStage(NamedTuple):
    """Parts ``start`` to ``stop``, not included, on so many ranks."""

    ranks: int
    start: int
    stop: int


def best_replicated(
    seconds: Sequence[float],
    parameter_bytes: Sequence[float],
    sent_bytes: Sequence[float],
    ranks: int,
    bandwidth: float,
) -> tuple[float, tuple[ReplicatedStage, ...]]:
    """Return the seconds of a minibatch in the steady state, and the stages; of equally fast ones, the fewest.

    A stage of q replicas takes the longer of its passes and of the sums of its gradients, 2 (q - 1) / bandwidth times
    its parameters, over q. The messages between two stages are shared by the replicas of the second.

    Args:
        seconds: forward and backward, of each part of the model in order.
        parameter_bytes: of each part.
        sent_bytes: of the values that each part hands on for a minibatch; those of the last do not count.
        ranks: of all stages together.
        bandwidth: bytes per second of a rank.
    """
    size = len(seconds)
    compute, weights = (np.concatenate([[0.0], np.cumsum(values)]) for values in (seconds, parameter_bytes))
    windows = np.triu(np.ones((size + 1, size + 1), dtype=bool), 1)
    ends = np.arange(size + 1)
    travels = 2 * np.concatenate([[0.0], np.asarray(sent_bytes, dtype=np.float64)]) / bandwidth

    def stage_s(replicas: int) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
        """(begin, end) -> seconds of a minibatch; infinite where nothing is between."""
        passes, sums = compute - compute[:, None], 2 * (replicas - 1) * (weights - weights[:, None]) / bandwidth
        return np.where(windows, np.maximum(passes, sums) / replicas, np.inf)

    by_replicas = {replicas: stage_s(replicas) for replicas in range(1, ranks + 1)}
    best = {count: by_replicas[count][0].copy() for count in by_replicas}  # of the first parts, on so many ranks
    last = {count: [(count, 0)] * (size + 1) for count in best}  # replicas of the last stage, and where it begins
    for count in best:
        for replicas in range(1, count):
            times = np.maximum(best[count - replicas][:, None], by_replicas[replicas])
            times = np.maximum(times, travels[:, None] / replicas)
            begins = times.argmin(axis=0)
            fastest = times[begins, ends]
            for place in np.flatnonzero(fastest < best[count] * (1 - 1e-9)).tolist():
                best[count][place], last[count][place] = fastest[place], (replicas, int(begins[place]))
    stages, count, end = [], ranks, size
    while end:
        replicas, begin = last[count][end]
        stages.append(ReplicatedStage(replicas, begin, end))
        count, end = count - replicas, begin
    return float(best[ranks][size]), tuple(reversed(stages))
