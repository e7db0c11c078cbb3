"""The schedules of pipelines with one copy of the model, each a pure function to every rank's F and B in order.

Letters: depth D, m microbatches, v chunks a rank; F, B, I and W seconds of a stage's forward and backward pass, and of
the halves of the latter. Schedules are compute-only, as papers draw them; ``passes`` adds everything else. Those with
two inverted copies are in ``gems`` and ``bidirectional``.
"""

from __future__ import annotations

from parallel.schedule.action import Action, Kind, Schedule
from parallel.schedule.microbatch import split_batch


def mp_basic(depth: int, m: int) -> Schedule:
    """One microbatch at a time through all stages: MP-Basic of GEMS (Jain et al., SC'20).

    Rank k: F0 B0 F1 B1 ... of stage k. One rank works at a time, so a step takes m D (F + B); in return a rank
    keeps the activations of one microbatch only. The reference the others are held against.
    """
    return {k: [Action(kind, k, i) for i in range(m) for kind in (Kind.FORWARD, Kind.BACKWARD)] for k in range(depth)}


def gpipe(depth: int, m: int) -> Schedule:
    """All forward passes, then all backward passes: GPipe (Huang et al., NeurIPS 2019).

    Step time (m + D - 1)(F + B); every rank keeps the activations of all m microbatches, which recomputation is to make
    small. B in the order of the F, where the paper draws the reverse: equally long, and gradients add up as in the
    plain step.
    """
    return {k: [Action(kind, k, i) for kind in (Kind.FORWARD, Kind.BACKWARD) for i in range(m)] for k in range(depth)}


def one_f_one_b(depth: int, m: int) -> Schedule:
    """One forward, one backward: PipeDream-flush (Narayanan et al., ICML 2021) and DAPPLE (Fan et al., PPoPP 2021).

    Rank k: min(m, D - k) forward passes, then B and F in turn, then the rest of the B. The step takes (m + D - 1)(F
    + B) as in GPipe, but rank k keeps min(m, D - k) microbatches instead of m.
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


def interleaved(depth: int, m: int, chunks: int) -> Schedule:
    """Several chunks of the model on each rank, so that pipelines fill sooner: Megatron-LM (Narayanan et al., SC 2021).

    Stage s of D v is on rank s mod D. Each round goes through the rank's first chunk, then its second and so on;
    backward the other way round. Rank k does (v - 1) rounds' worth of F and 2 (D - 1 - k) more ahead, then F and B
    in turn, then the rest of the B. With F and B of all v chunks of a rank together, a step takes m (F + B) + (D -
    1)(F + B) / v for m >= D: the bubble of 1f1b over v, for v times the messages. The paper asks for m divisible by
    D. Here microbatches go in rounds of D to 2D - 1, as even as they can be: the paper's order where D divides m,
    the same formula elsewhere.
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


def zero_bubble(depth: int, m: int) -> Schedule:
    """Backward passes in two halves, the second of which fills the bubbles: ZB-H1 (Qi et al., ICLR 2024).

    Rank k: the order of 1f1b with I (gradients of the inputs) for B, and W (of the parameters) k microbatches
    behind. Only I holds up other ranks: for m >= D and F, I and W of about one length the step takes m (F + I + W)
    + (D - 1)(F + I - W), against (m + D - 1)(F + I + W) of 1f1b. Rank k keeps k microbatches more than in 1f1b,
    min(m, D) on every rank: the peak of the step is that of 1f1b, where rank 0 has it.
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
