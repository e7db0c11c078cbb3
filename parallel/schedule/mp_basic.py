"""One microbatch at a time through all stages: layer parallelism without a pipeline, MP-Basic of GEMS (Jain, SC'20).

Takes the depth D and m microbatches, gives each rank's F and B in order. One rank works at a time, so a step takes
m D (F + B); in return a rank keeps the activations of one microbatch only. The reference the others are held against.
"""

from __future__ import annotations

from parallel.schedule.action import Action, Kind, Schedule


def mp_basic(depth: int, m: int) -> Schedule:
    """Rank k: F0 B0 F1 B1 ... of stage k. Step time m D (F + B)."""
    return {k: [Action(kind, k, i) for i in range(m) for kind in (Kind.FORWARD, Kind.BACKWARD)] for k in range(depth)}
