"""How long summing takes over CPU and GPU ranks, as a formula: latency, and bytes over the speeds of what they cross.

Takes measured seconds by way and bytes; gives the speeds that explain them best, and seconds for other machines. One
CPU rank and g GPU ranks on each of N machines:

    flat     2 (R - 1) / R n / ring                           a ring over all R = N (g + 1) ranks
    host     2 n / copy + (g + 2) n / host + 2 (N - 1) / N n / network
    device   2 n / copy + n / gpu + 2 (g N - 1) / (g N) n / ring
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

WAYS = ("flat", "host", "device")
SPEEDS = ("copy", "host", "gpu", "network", "ring")


def crossings(way: str, nodes: int, gpus: int) -> dict[str, float]:
    """What the n bytes of a rank cross how many times, by the names of ``SPEEDS``.

    >>> crossings("host", nodes=2, gpus=1)
    {'copy': 2.0, 'host': 3.0, 'network': 1.0}
    """
    if way == "host":
        return {"copy": 2.0, "host": gpus + 2.0, "network": 2.0 * (nodes - 1) / nodes}
    ring = nodes * (gpus if way == "device" else gpus + 1)
    crossed = {"ring": 2.0 * (ring - 1) / ring}
    return crossed if way == "flat" else {"copy": 2.0, "gpu": 1.0, **crossed}


@dataclass(frozen=True)
class Machine:
    """``nodes`` machines of one CPU rank and ``gpus`` others.

    Attributes:
        speeds: bytes/s, by the names of ``SPEEDS``.
        latency_s: of each way.
    """

    nodes: int
    gpus: int
    speeds: Mapping[str, float]
    latency_s: Mapping[str, float]

    def seconds(self, way: str, size: float) -> float:
        """Of a sum of ``size`` bytes a rank."""
        per_byte = sum(times / self.speeds[name] for name, times in crossings(way, self.nodes, self.gpus).items())
        return self.latency_s[way] + size * per_byte


def fit_stand_ins(nodes: int, gpus: int, measured: Sequence[tuple[str, int, float]]) -> Machine:
    """The machine that explains ``measured``, (way, bytes, seconds), with the least squared relative error.

    Where CPU ranks stand in for GPUs, copies and additions on the host and on the "GPU" are of one memory, network and
    ring of one link: two speeds and three latencies for all of the sweep.
    """
    memory, columns = {"copy", "host", "gpu"}, [*WAYS, "memory", "link"]
    rows = []
    for way, size, seconds in measured:
        crossed = crossings(way, nodes, gpus)
        of = {
            way: 1.0,
            "memory": size * sum(times for name, times in crossed.items() if name in memory),
            "link": size * sum(times for name, times in crossed.items() if name not in memory),
        }
        rows.append([of.get(column, 0.0) / seconds for column in columns])
    found = _at_least_nothing(np.array(rows), np.ones(len(rows)))
    parts = dict(zip(columns, found.tolist(), strict=True))
    speed = {column: 1 / parts[column] if parts[column] else float("inf") for column in ("memory", "link")}
    speeds = {name: speed["memory" if name in memory else "link"] for name in SPEEDS}
    return Machine(nodes, gpus, speeds, {way: parts[way] for way in WAYS})


def _at_least_nothing(rows: np.ndarray, ones: np.ndarray) -> np.ndarray:
    """Least squares whose unknowns are not negative: those that would be are nothing, the worst first."""
    kept = list(range(rows.shape[1]))
    scale = np.abs(rows).max(axis=0)
    while True:
        solution = np.zeros(rows.shape[1])
        solution[kept] = np.linalg.lstsq(rows[:, kept] / scale[kept], ones, rcond=None)[0] / scale[kept]
        worst = min(kept, key=lambda k: solution[k] * scale[k])
        if solution[worst] >= 0:
            return solution
        kept.remove(worst)
