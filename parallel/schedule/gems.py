"""Two replicas, the second inverted, in turn: MAST and MASTER of GEMS (Jain et al., SC'20).

Takes the depth D and m microbatches, gives each rank's F and B in order. Stage s of replica 1 is on rank D - 1 - s, so
that a microbatch begins on the rank on which the one before it turned round, and its forward pass follows the other's
backward pass through the ranks. A rank keeps the activations of one microbatch at a time, as in mp-basic, and the
parameters of two stages. It buys batch size at constant activation memory, at no more than 1.5 times mp-basic's speed.
"""

from __future__ import annotations

from parallel.schedule.action import Action, Kind, Schedule


def master(depth: int, m: int) -> Schedule:
    """Microbatch i goes through replica i mod 2; on every rank its F follows the B of the one before.

    Step time m (D B + F) + (D - 1) F for B >= F.
    """
    return {
        k: [
            Action(kind, depth - 1 - k if i % 2 else k, i, replica=i % 2)
            for i in range(m)
            for kind in (Kind.FORWARD, Kind.BACKWARD)
        ]
        for k in range(depth)
    }


def mast(depth: int, m: int) -> Schedule:
    """One microbatch through each replica. Step time D (F + 2B) + F for B >= F.

    Raises:
        ValueError: ``m`` is not 2.
    """
    if m != 2:
        raise ValueError(f"mast computes 2 microbatches a group, not {m}: use master, which is mast for any number")
    return master(depth, m)
