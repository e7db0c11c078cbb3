"""Backward passes in two halves, the second of which fills the bubbles: ZB-H1 (Qi et al., ICLR 2024).

Takes the depth D and m microbatches, gives each rank's F, I (gradients of the inputs) and W (of the parameters) in
order. Only I holds up other ranks, so W can wait: for m >= D and F, I and W of about one length the step takes
m (F + I + W) + (D - 1)(F + I - W), against (m + D - 1)(F + I + W) of 1f1b. Rank k keeps k microbatches more than in
1f1b, which makes min(m, D) on every rank: the peak of the step is that of 1f1b, where rank 0 has it.
"""

from __future__ import annotations

from parallel.schedule.action import Action, Kind, Schedule


def zero_bubble(depth: int, m: int) -> Schedule:
    """Rank k: the order of 1f1b with I for B, and W following k microbatches behind I.

    Step time m (F + I + W) + (D - 1)(F + I - W) for m >= D.
    """
    schedule: Schedule = {}
    for k in range(depth):
        ahead = min(m, depth - k)
        actions = [Action(Kind.FORWARD, k, i) for i in range(ahead)]
        for i in range(m):
            actions.append(Action(Kind.BACKWARD_INPUT, k, i))
            if i >= k:
                actions.append(Action(Kind.BACKWARD_WEIGHT, k, i - k))
            if ahead + i < m:
                actions.append(Action(Kind.FORWARD, k, ahead + i))
        actions += [Action(Kind.BACKWARD_WEIGHT, k, i) for i in range(max(0, m - k), m)]
        schedule[k] = actions
    return schedule
