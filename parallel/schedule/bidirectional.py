"""Two inverted replicas with several microbatches in flight in each: Chimera (Li & Hoefler, SC'21), as in DualPipe.

Takes the depth D and m microbatches, gives each rank's F and B in order. Even microbatches go through replica 0, odd
ones through replica 1, whose stage s is on rank D - 1 - s; each pipeline fills the other's bubbles. For even D and m
the bubble comes near (D - 2) / (2m + D - 2) of the step, which then takes about m (F + B) + (D - 2)(F + B) / 2.

The papers draw the merged order for some D and m only. Here it is found for any, by list scheduling: time runs in units
(F = 1, B = 2), and a free rank takes the most urgent action that is ready. Stage s keeps at most D - s microbatches, as
in 1f1b, hence a rank at most D + 1 in its two stages. Within that each pipeline alone can always move, so neither ever
blocks the other. No order is shorter than m (F + B) + floor((D - 1) / 2)(F + B), for the sake of the ranks in the
middle; for m >= D this one takes at most D / 2 + 1 forward passes more (tried for D to 12 and m to 40).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from parallel.schedule.action import Action, Kind, Schedule

DURATION = {Kind.FORWARD: 1, Kind.BACKWARD: 2}


def bidirectional(depth: int, m: int) -> Schedule:
    """The shortest that the rules below give, in units of F = 1, B = 2; step time as above."""
    timed = [_list_schedule(depth, m, urgency) for urgency in (_begun_first, _deep_first)]
    return min(timed, key=lambda pair: pair[0])[1]


def _begun_first(action: Action) -> tuple[int, ...]:
    """First rule: begun microbatches reach the last stage first, then gradients flow, then new microbatches begin."""
    assert action.microbatch is not None
    forward = action.kind is Kind.FORWARD
    return (0 if forward and action.stage else 2 if forward else 1, -action.stage, action.microbatch)


def _deep_first(action: Action) -> tuple[int, ...]:
    """Second rule: F nearest the loss first, then B farthest from it, and a new microbatch like a B of the first stage.
    Shorter than the first rule for D = 3 and for most odd m."""
    assert action.microbatch is not None
    return (-action.stage if action.kind is Kind.FORWARD else action.stage, action.microbatch)


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
