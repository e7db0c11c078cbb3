"""The schedules by name in ``registry``, each a pure function to every rank's F and B in order.

Letters: depth D, m microbatches, v chunks a rank; F, B, I and W seconds of a stage's forward and backward pass, and of
the halves of the latter. In schedules with two copies of the model the second is inverted: stage s of replica 1 is on
rank D - 1 - s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from parallel.schedule.action import Action, Kind, Schedule
from parallel.schedule.passes import add_updates
from parallel.schedule.shares import split_batch

DURATION = {Kind.FORWARD: 1, Kind.BACKWARD: 2}
"""Units of an action in the list scheduling of ``bidirectional``."""


def mp_basic(depth: int, m: int) -> Schedule:
    """One microbatch at a time through all stages: MP-Basic of GEMS (Jain et al., SC'20).

    Rank k: F0 B0 F1 B1 ... of stage k. One rank works at a time, so a step takes m D (F + B); in return a rank
    keeps the activations of one microbatch only. The reference the others are held against.
    """
    return {k: [Action(kind, k, i) for i in range(m) for kind in (Kind.FORWARD, Kind.BACKWARD)] for k in range(depth)}


def gpipe(depth: int, m: int) -> Schedule:
    """All forward passes, then all backward passes: GPipe (Huang et al., NeurIPS 2019).

    Step time (m + D - 1)(F + B); every rank keeps the activations of all m microbatches. B in the order of the F, where
    the paper draws the reverse: equally long, and gradients add up as in the plain step.
    """
    return {k: [Action(kind, k, i) for kind in (Kind.FORWARD, Kind.BACKWARD) for i in range(m)] for k in range(depth)}


def one_f_one_b(depth: int, m: int) -> Schedule:
    """One forward, one backward: PipeDream-flush (Narayanan et al., ICML 2021) and DAPPLE (Fan et al., PPoPP 2021).

    Rank k: min(m, D - k) forward passes, then B and F alternate, then the rest of the B. The step takes (m + D - 1)(F
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


def pipedream(depth: int, m: int) -> Schedule:
    """1F1B in which every microbatch updates each stage behind its backward pass: PipeDream (Harlap et al., 2018).

    Nothing is flushed between two minibatches, here called microbatches: one takes max(F + B + U), and rank k holds
    D - k of them. Between two steps the pipeline is empty. Microbatch i goes through stage s, forward and backward,
    with the weights that stage s had after max(0, i - (D - 1 - s)) updates of the step.
    """
    return add_updates(one_f_one_b(depth, m))


def interleaved(depth: int, m: int, chunks: int) -> Schedule:
    """Several chunks of the model on each rank, so that pipelines fill sooner: Megatron-LM (Narayanan et al., SC 2021).

    Stage s of D v is on rank s mod D. Each round goes through the rank's first chunk, then its second and so on;
    backward the other way round. Rank k does (v - 1) rounds' worth of F and 2 (D - 1 - k) more ahead, then F and B
    alternate, then the rest of the B. With F and B of all v chunks of a rank together, a step takes m (F + B) + (D -
    1)(F + B) / v for m >= D: the bubble of 1f1b over v, for v times the messages. Microbatches go in rounds of D to 2D
    - 1, as even as they can be: the paper's order where D divides m.
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
    for k, actions in one_f_one_b(depth, m).items():
        schedule[k] = row = []
        for action in actions:
            backward = action.kind is Kind.BACKWARD
            row.append(action.as_kind(Kind.BACKWARD_INPUT) if backward else action)
            if backward and action.i >= k:
                row.append(Action(Kind.BACKWARD_WEIGHT, k, action.i - k))
        row += [Action(Kind.BACKWARD_WEIGHT, k, i) for i in range(max(0, m - k), m)]
    return schedule


def master(depth: int, m: int) -> Schedule:
    """Two inverted replicas that alternate: MASTER of GEMS (Jain et al., SC'20).

    Microbatch i goes through replica i mod 2; on every rank its F follows the B of the one before. A rank keeps the
    activations of one microbatch at a time, as in mp-basic, and the parameters of two stages. Step time m (D B + F) +
    (D - 1) F for B >= F: no more than 1.5 times mp-basic's speed. With m = 2 it is MAST of the same paper.
    """
    return {
        k: [
            Action(kind, depth - 1 - k if i % 2 else k, i, replica=i % 2)
            for i in range(m)
            for kind in (Kind.FORWARD, Kind.BACKWARD)
        ]
        for k in range(depth)
    }


def bidirectional(depth: int, m: int) -> Schedule:
    """Two inverted replicas with several microbatches in flight: Chimera (Li & Hoefler, SC'21), as in DualPipe.

    Even microbatches go through replica 0, odd ones through replica 1; each pipeline fills the other's bubbles. For
    even D and m the bubble comes near (D - 2) / (2m + D - 2) of the step, which takes about m (F + B) + (D - 2)(F + B)
    / 2. The papers draw the order for some D and m only. Here it is found for any, by list scheduling: time runs in
    units (F = 1, B = 2), a free rank takes the most urgent action that is ready, and the shorter result of two rules of
    urgency is taken. Stage s keeps at most D - s microbatches, hence a rank at most D + 1 in its two stages. Within
    that each pipeline alone can always move, so neither ever blocks the other. No order is shorter than m (F + B) +
    floor((D - 1) / 2)(F + B); for m >= D this one takes at most D / 2 + 1 forward passes more (tried for D to 12 and m
    to 40).
    """
    timed = [_list_schedule(depth, m, urgency) for urgency in (_begun_first, _deep_first)]
    return min(timed, key=lambda pair: pair[0])[1]


def _begun_first(action: Action) -> tuple[int, ...]:
    """First rule: begun microbatches reach the last stage first, then gradients flow, then others begin."""
    forward = action.kind is Kind.FORWARD
    return (0 if forward and action.stage else 2 if forward else 1, -action.stage, action.i)


def _deep_first(action: Action) -> tuple[int, ...]:
    """Second rule: F nearest the loss first, then B farthest from it. Shorter for D = 3 and for most odd m."""
    return (-action.stage if action.kind is Kind.FORWARD else action.stage, action.i)


def _list_schedule(depth: int, m: int, urgency: Callable[[Action], tuple[int, ...]]) -> tuple[int, Schedule]:
    """(Makespan in units, schedule) when a free rank takes the ready action of the least ``urgency``."""
    schedule: Schedule = {k: [] for k in range(depth)}
    free_at = [0] * depth
    done_at: dict[Action, int] = {}
    counts = {(stage, replica): [0, 0] for stage in range(depth) for replica in (0, 1)}  # of F and of B begun
    now = 0

    def is_done(kind: Kind, stage: int, i: int, replica: int) -> bool:
        """True for stages outside the model, so that its ends wait for nothing."""
        return not 0 <= stage < depth or done_at.get(Action(kind, stage, i, replica), now + 1) <= now

    def ready(k: int) -> Iterator[Action]:
        """The next F and the next B of each of rank k's two stages, as far as nothing holds them up."""
        for replica, stage in ((0, k), (1, depth - 1 - k)):
            share = range(replica, m, 2)
            begun, ended = counts[stage, replica]
            if ended < begun and is_done(Kind.BACKWARD, stage + 1, share[ended], replica):
                yield Action(Kind.BACKWARD, stage, share[ended], replica)
            room = begun < min(len(share), ended + depth - stage)
            if room and is_done(Kind.FORWARD, stage - 1, share[begun], replica):
                yield Action(Kind.FORWARD, stage, share[begun], replica)

    while len(done_at) < 2 * m * depth:
        for k in range(depth):
            action = min(ready(k), key=urgency, default=None) if free_at[k] <= now else None
            if action:
                free_at[k] = done_at[action] = now + DURATION[action.kind]
                counts[action.stage, action.replica][action.kind is Kind.BACKWARD] += 1
                schedule[k].append(action)
        now += 1
    return max(free_at), schedule
