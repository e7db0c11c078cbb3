"""Several chunks of the model on each rank, so that the pipeline fills sooner: Megatron-LM (Narayanan et al., SC 2021).

Takes the depth D, m microbatches and v chunks a rank (stages = D v, stage s on rank s mod D), gives each rank's F and B
in order. With F and B the times of all v chunks of a rank together, a step takes m (F + B) + (D - 1)(F + B) / v for
m >= D: the bubble of 1f1b over v, for v times the messages. The paper asks for m divisible by D. Here microbatches go
in rounds of D to 2D - 1, as even as they can be, which is the paper's order where D divides m and the same formula
elsewhere.
"""

from __future__ import annotations

from parallel.schedule.action import Action, Kind, Schedule
from parallel.schedule.microbatch import split_batch


def interleaved(depth: int, m: int, chunks: int) -> Schedule:
    """Each round goes through the rank's first chunk, then its second and so on; backward the other way round.

    Rank k does (v - 1) rounds' worth of F and 2 (D - 1 - k) more ahead, then F and B in turn, then the rest of the B.
    Step time m (F + B) + (D - 1)(F + B) / v for m >= D.
    """
    rounds = split_batch(m, max(1, m // depth))
    schedule: Schedule = {}
    for k in range(depth):
        stages = range(k, depth * chunks, depth)
        forward = [Action(Kind.FORWARD, s, i) for turn in rounds for s in stages for i in turn]
        backward = [Action(Kind.BACKWARD, s, i) for turn in rounds for s in reversed(stages) for i in turn]
        ahead = min(len(forward), (chunks - 1) * len(rounds[0]) + 2 * (depth - 1 - k))
        actions = forward[:ahead]
        for n, action in enumerate(backward):
            actions += [*forward[ahead + n : ahead + n + 1], action]
        schedule[k] = actions
    return schedule
