"""All forward passes, then all backward passes: GPipe (Huang et al., NeurIPS 2019).

Takes the depth D and m microbatches, gives each rank's F and B in order. The step takes (m + D - 1)(F + B); every rank
keeps the activations of all m microbatches, which recomputation is to make small.
"""

from __future__ import annotations

from parallel.schedule.action import Action, Kind, Schedule


def gpipe(depth: int, m: int) -> Schedule:
    """Rank k: F of every microbatch, then B of every microbatch. Step time (m + D - 1)(F + B).

    B in the order of the F, where the paper draws the reverse: equally long, and gradients add up as in the plain step.
    """
    return {k: [Action(kind, k, i) for kind in (Kind.FORWARD, Kind.BACKWARD) for i in range(m)] for k in range(depth)}
