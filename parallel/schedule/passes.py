"""Passes that lower a compute-only schedule: recomputation, messages, sums of gradients, and copies of activations to
the host and back.

Passes are each a pure function from schedule to schedule, as in Zero Bubble Pipeline Parallelism (Qi et al., ICLR
2024); the schedule has passed ``check``. A receive only posts that a message is awaited; the compute action that needs
it waits. It is posted about one compute action ahead, so that messages travel while ranks compute, as far as no device
gets stuck: over NCCL a receive holds the device until its message has come, a send until its receive is posted, and a
sum until all ranks have begun it. Any action may have to wait for its device, as where memory is freed, and so for all
that its rank has begun. So all actions are put into one order (``in_order``) in which ranks could do them one after the
other, each after the messages and sums that its rank has begun.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from parallel.schedule.action import BEGINS_BACKWARD, COMPUTE, SENDS, Action, Kind, Schedule
from parallel.schedule.dependencies import Dependencies, Links, begin_times, peer_rank, users_or_makers
from parallel.schedule.mesh import Mesh
from parallel.schedule.timeline import StageCost, seconds_by_kind


def lower(
    schedule: Schedule,
    mesh: Mesh,
    links: Links,
    *,
    recompute: bool = False,
    offload: bool = False,
    costs: Sequence[StageCost] | None = None,
    reduce_at_end: bool = False,
    reduce_each: bool = False,
) -> Schedule:
    """Return everything that each rank does in a step.

    Args:
        schedule: compute-only, of all ranks.
        recompute: keep no activations between the forward pass of a microbatch and its backward pass.
        offload: move them to the host meanwhile.
        costs: of the stages, with their copies; ``offload`` needs them.
        reduce_at_end: sum no gradients before everything is computed.
        reduce_each: sum those of each microbatch, not of all.
    """
    if recompute:
        schedule = add_recompute(schedule)
    place = in_order(schedule, mesh, Dependencies(mesh, links))
    lowered = add_communication(schedule, mesh, links, place)
    lowered = add_reduction(lowered, mesh, place, at_end=reduce_at_end, each=reduce_each)
    if not offload:
        return lowered
    assert costs is not None
    return add_offload(lowered, costs)


def add_offload(schedule: Schedule, costs: Sequence[StageCost]) -> Schedule:
    """Add an OFFLOAD after each F whose activations have time to go to the host and back before their backward pass. A
    PREFETCH follows as early as the way back takes.

    Args:
        costs: of the stages, with their copies.
    """
    return {rank: list(_with_offload(actions, costs)) for rank, actions in schedule.items()}


def _with_offload(actions: list[Action], costs: Sequence[StageCost]) -> Iterator[Action]:
    computing = [n for n, action in enumerate(actions) if action.kind in COMPUTE]
    ahead: dict[int, list[Action]] = defaultdict(list)
    behind: dict[int, list[Action]] = defaultdict(list)
    begun: dict[tuple[int, int | None, int], int] = {}
    for k, n in enumerate(computing):
        action = actions[n]
        if action.kind is Kind.FORWARD:
            begun[action.key] = k
        elif (start := begun.pop(action.key, None)) is not None:
            between = computing[start + 1 : k]
            first = _prefetched([actions[position] for position in between], action.stage, costs)
            if first is not None:
                behind[_end_of_sends(actions, computing[start])].append(action.as_kind(Kind.OFFLOAD))
                ahead[between[first]].append(action.as_kind(Kind.PREFETCH))
    for n, action in enumerate(actions):
        yield from ahead[n]
        yield action
        yield from behind[n]


def _prefetched(between: Sequence[Action], stage: int, costs: Sequence[StageCost]) -> int | None:
    """Return before which action of ``between`` the way back begins; None where there is not the time for it."""
    if not between:
        return None
    own = costs[stage]
    # Copies out have begun with the forward pass, those back go on beside the backward pass.
    out_s, back_s = max(0.0, own.out_s - own.forward_s), max(0.0, own.back_s - own.backward_s)
    seconds = [seconds_by_kind(costs[action.stage])[action.kind] for action in between]
    if sum(seconds) < out_s + back_s:
        return None
    first, room = len(between) - 1, seconds[-1]
    while room < back_s:
        first -= 1
        room += seconds[first]
    return first


def add_updates(schedule: Schedule) -> Schedule:
    """An UPDATE right after each B: every microbatch updates each stage as soon as the stage has its gradients."""
    return {
        rank: [
            each
            for action in actions
            for each in ([action, action.as_kind(Kind.UPDATE)] if action.kind is Kind.BACKWARD else [action])
        ]
        for rank, actions in schedule.items()
    }


def add_recompute(schedule: Schedule) -> Schedule:
    """A RECOMPUTE right before each B or I, unless the rank has just computed that very forward pass."""
    return {rank: list(_with_recompute(actions)) for rank, actions in schedule.items()}


def _with_recompute(actions: list[Action]) -> Iterator[Action]:
    previous = None
    for action in actions:
        if action.kind in BEGINS_BACKWARD and previous != action.as_kind(Kind.FORWARD):
            yield action.as_kind(Kind.RECOMPUTE)
        yield action
        previous = action


Receives = dict[int, dict[int, list[Action]]]
"""Rank -> position of a compute action -> receives posted right before it."""


@dataclass(slots=True)
class _Message:
    """A message that ``action`` of one rank makes for ``target``, which had better post its receive at ``wanted``."""

    action: Action
    following: Action | None  # of the sender
    target: int
    receive: Action
    wanted: int = 0


def _messages(schedule: Schedule, mesh: Mesh, between: Dependencies) -> list[_Message]:
    """Return all messages, channel by channel in the order in which they are sent."""
    positions = {action: n for actions in schedule.values() for n, action in enumerate(actions)}
    channels: dict[tuple[int, int], list[_Message]] = defaultdict(list)
    for rank, actions in schedule.items():
        for action, following in zip(actions, [*actions[1:], None], strict=True):
            for send in between.sends_after(action, rank):
                target = peer_rank(send, mesh, rank)
                channels[rank, target].append(_Message(action, following, target, send.other_end))
    for messages in channels.values():
        latest = len(positions)
        for message in reversed(messages):  # one action ahead of the user, and not behind those that come after
            needed_at = next(positions[user] for user in users_or_makers(message.receive) if user in positions)
            if needed_at and schedule[message.target][needed_at - 1].kind is Kind.UPDATE:
                needed_at -= 1  # too short for a message to travel meanwhile
            message.wanted = latest = min(latest, max(0, needed_at - 1))
    return [message for way in sorted(channels) for message in channels[way]]


def in_order(schedule: Schedule, mesh: Mesh, between: Dependencies) -> dict[Action, int]:
    """Return the place of each action of a compute-only ``schedule`` in an order in which ranks can do them, about that
    in which they begin.

    Messages are made before the action that had better post their receives, and that comes before the sender's next
    action, where this is possible.
    """
    wished: dict[Action, list[Action]] = defaultdict(list)
    for message in _messages(schedule, mesh, between):
        actions = schedule[message.target]
        wished[actions[message.wanted]].append(message.action)
        if message.following and message.wanted:
            wished[message.following].append(actions[message.wanted - 1])
    begins = begin_times(schedule, lambda action, _: between.computed_before(action), wished)
    return {action: place for place, action in enumerate(sorted(begins, key=begins.__getitem__))}


def _announce(schedule: Schedule, mesh: Mesh, between: Dependencies, place: Mapping[Action, int]) -> Receives:
    """Return the receives of each rank, by the position of the compute action before which they are posted."""
    # A receive at position p of a rank is safe where its message is made before the rank does action p, and the rank
    # has done action p - 1 before the sender's next action.
    places = {rank: [place[action] for action in actions] for rank, actions in schedule.items()}
    receives: Receives = {rank: defaultdict(list) for rank in schedule}
    for message in _messages(schedule, mesh, between):
        own = places[message.target]
        first = bisect_left(own, place[message.action])
        last = bisect_left(own, place[message.following]) if message.following else len(own)
        receives[message.target][min(max(message.wanted, first), last)].append(message.receive)
    return receives


def add_communication(
    schedule: Schedule, mesh: Mesh, links: Links, place: Mapping[Action, int] | None = None
) -> Schedule:
    """Sends after the compute action that makes what they send, receives about one compute action before the one in
    need.

    The receives of a rank from another stand in the order in which that one sends, so that a channel needs no tags. The
    gradient of a message is never awaited before the message itself was sent, which tells its shapes.

    Args:
        place: of each compute action, as ``in_order`` gives it; None: as it does.
    """
    between = Dependencies(mesh, links)
    sends = {action: between.sends_after(action, rank) for rank, actions in schedule.items() for action in actions}
    receives = _announce(schedule, mesh, between, place or in_order(schedule, mesh, between))
    return {
        rank: [
            each
            for position, action in enumerate(actions)
            for each in (*receives[rank][position], action, *sends[action])
        ]
        for rank, actions in schedule.items()
    }


def add_reduction(
    schedule: Schedule, mesh: Mesh, place: Mapping[Action, int], *, at_end: bool = False, each: bool = False
) -> Schedule:
    """A REDUCE of each stage that several ranks hold, on each of them, as early as the last B or W of all of them
    allows, or ``at_end`` of everything.

    Sums are collective: all ranks begin them in one order, each after its actions that begin no later than the last one
    that adds to a copy. A rank with both replicas of a stage sums them once.

    Args:
        place: of each compute action, as ``in_order`` gives it.
        each: also one as early as the first B or W of all of them allows, the second, and so on.
    """
    sums: list[tuple[int, int]] = []  # place of the last action that adds to a copy, and stage
    for stage in range(mesh.stages):
        adding = (Kind.BACKWARD, Kind.BACKWARD_WEIGHT)
        of_ranks = [[place[a] for a in row if a.kind in adding and a.stage == stage] for row in schedule.values()]
        rounds = itertools.zip_longest(*of_ranks, fillvalue=0)
        done = list(itertools.accumulate(map(max, rounds), max))
        if done and len(mesh.ranks_with(stage)) > 1:
            sums += [(last, stage) for last in (done if each and not at_end else done[-1:])]
    lowered: Schedule = {}
    for rank, actions in schedule.items():
        replicas: dict[int, int] = {}
        for stage, replica in mesh.held_by(rank):
            replicas.setdefault(stage, replica)
        after: dict[int, list[Action]] = defaultdict(list)
        for done_at, stage in sorted(sums):
            if stage in replicas:  # a copy that no microbatch went through is summed all the same
                before = [n for n, action in enumerate(actions) if place.get(action, math.inf) <= done_at]
                last = len(actions) - 1 if at_end else _end_of_sends(actions, before[-1]) if before else -1
                after[last].append(Action(Kind.REDUCE, stage, None, replicas[stage]))
        lowered[rank] = after[-1] + [every for n, action in enumerate(actions) for every in (action, *after[n])]
    return lowered


def _end_of_sends(actions: list[Action], position: int) -> int:
    """Last position of the sends that follow the compute action at ``position``: other ranks wait for them."""
    while position + 1 < len(actions) and actions[position + 1].kind in SENDS:
        position += 1
    return position
