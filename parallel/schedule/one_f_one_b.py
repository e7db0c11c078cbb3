"""One forward, one backward: PipeDream-flush (Narayanan et al., ICML 2021) and DAPPLE (Fan et al., PPoPP 2021).

Takes the depth D and m microbatches, gives each rank's F and B in order. The step takes (m + D - 1)(F + B) as in GPipe,
but rank k starts on backward passes as soon as it can and keeps min(m, D - k) microbatches instead of m.
"""

from __future__ import annotations

from parallel.schedule.action import Action, Kind, Schedule


def one_f_one_b(depth: int, m: int) -> Schedule:
    """Rank k: min(m, D - k) forward passes, then B and F in turn, then the rest of the B.

    Step time (m + D - 1)(F + B).
    """
    schedule: Schedule = {}
    for k in range(depth):
        ahead = min(m, depth - k)
        actions = [Action(Kind.FORWARD, k, i) for i in range(ahead)]
        for i in range(m):
            actions.append(Action(Kind.BACKWARD, k, i))
            if ahead + i < m:
                actions.append(Action(Kind.FORWARD, k, ahead + i))
        schedule[k] = actions
    return schedule
