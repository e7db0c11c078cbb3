"""One order of the actions of all ranks, and where each rank posts its receives in it: one compute action ahead of use,
as far as no device gets stuck.

A receive over NCCL holds the device until its message has come, a send until its receive is posted, and a sum until all
ranks have begun it. Any action may have to wait for its device, as where memory is freed: then it waits for all that
its rank has begun. So all actions are put into one order in which ranks could do them one after the other, each after
the messages and sums that its rank has begun.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from parallel.schedule.action import Action, Kind, Schedule
from parallel.schedule.dependencies import Dependencies, begin_times, peer_rank, users_or_makers
from parallel.schedule.mesh import Mesh

Receives = dict[int, dict[int, list[Action]]]
"""Rank -> position of a compute action -> receives posted right before it."""


@dataclass(slots=True)
class _Message:
    """A message that ``action`` of one rank makes for ``target``, which had better post its receive at ``wanted``.

    Attributes:
        following: the sender's next action.
    """

    action: Action
    following: Action | None
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
    """Return the place of each action in an order in which ranks can do them, about that in which they begin.

    Messages are made before the action that had better post their receives, and that comes before the sender's next
    action, where this is possible.

    Args:
        schedule: compute-only, one that comes to its end.
    """
    wished: dict[Action, list[Action]] = defaultdict(list)
    for message in _messages(schedule, mesh, between):
        actions = schedule[message.target]
        wished[actions[message.wanted]].append(message.action)
        if message.following and message.wanted:
            wished[message.following].append(actions[message.wanted - 1])
    begins = begin_times(schedule, lambda action, _: between.computed_before(action), wished)
    return {action: place for place, action in enumerate(sorted(begins, key=begins.__getitem__))}


def announce(schedule: Schedule, mesh: Mesh, between: Dependencies, place: Mapping[Action, int]) -> Receives:
    """Return the receives of each rank, by the position of the compute action before which they are posted.

    A receive at position p of a rank is safe under two conditions: its message is made before the rank does action p,
    and the rank has done action p - 1 before the sender's next action. Wanted positions are kept where
    the order allows it.

    Args:
        schedule: compute-only, one that comes to its end.
        place: of each action, as ``in_order`` gives it.
    """
    places = {rank: [place[action] for action in actions] for rank, actions in schedule.items()}
    receives: Receives = {rank: defaultdict(list) for rank in schedule}
    for message in _messages(schedule, mesh, between):
        own = places[message.target]
        first = bisect_left(own, place[message.action])
        last = bisect_left(own, place[message.following]) if message.following else len(own)
        receives[message.target][min(max(message.wanted, first), last)].append(message.receive)
    return receives
