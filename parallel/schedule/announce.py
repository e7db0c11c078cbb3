"""Where each rank posts its receives: one compute action ahead of their use, as far as no device gets stuck.

Takes a compute-only schedule; gives the receives before each compute action. A receive over NCCL holds the device until
its message has come, and a send until its receive is posted. Any action may have to wait for its device: where memory
is freed to be allocated anew, for one. It then waits for all receives and sends before it, and must not be what those
wait for. So the schedule is walked as if each action waited, in an order in which every rank comes to its end.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

from parallel.schedule.action import Action, Kind, Schedule
from parallel.schedule.dependencies import SECONDS, Dependencies, users_or_makers
from parallel.schedule.mesh import Mesh

Receives = dict[int, dict[int, list[Action]]]
"""Rank -> position of a compute action -> receives posted right before it."""


@dataclass(eq=False)
class Channel:
    """The messages from one rank to another, in the order in which they are sent and received.

    Attributes:
        receives: of all messages.
        wanted: positions from which each receive is wanted, ascending.
        sent, posted: messages that have been, so far.
    """

    source: int
    target: int
    receives: list[Action] = field(default_factory=list)
    wanted: list[int] = field(default_factory=list)
    sent: int = 0
    posted: int = 0


def announce(schedule: Schedule, sends: Mapping[Action, list[Action]], mesh: Mesh, between: Dependencies) -> Receives:
    """Return the receives of each rank, by the position of the compute action before which they are posted.

    Args:
        schedule: compute-only, one that comes to its end.
        sends: what each action sends.
    """
    channels: dict[tuple[int, int], Channel] = {}
    sent: dict[Action, list[Channel]] = {}
    positions = {action: n for actions in schedule.values() for n, action in enumerate(actions)}
    for rank, actions in schedule.items():
        for action in actions:
            sent[action] = []
            for send in sends[action]:
                assert send.peer is not None
                way = rank, mesh.peer_team(rank, send.peer, send.replica)
                channel = channels.setdefault(way, Channel(*way))
                channel.receives.append(send.other_end)
                sent[action].append(channel)
    for channel in channels.values():
        channel.wanted = _wanted(channel.receives, positions)
    walk = _Walk(schedule, [channels[way] for way in sorted(channels)], sent, between)
    walk.finish()
    return walk.receives


class _Walk:
    """The ranks, each at one of its actions.

    Args:
        sent: action -> channels that it sends a message on.
    """

    def __init__(
        self,
        schedule: Schedule,
        channels: Sequence[Channel],
        sent: Mapping[Action, Sequence[Channel]],
        between: Dependencies,
    ) -> None:
        self.receives: Receives = {rank: defaultdict(list) for rank in schedule}
        self._schedule, self._sent, self._between = schedule, sent, between
        self._leaving: dict[int, list[Channel]] = {rank: [] for rank in schedule}
        self._arriving: dict[int, list[Channel]] = {rank: [] for rank in schedule}
        for channel in channels:
            self._leaving[channel.source].append(channel)
            self._arriving[channel.target].append(channel)
        self._at = dict.fromkeys(schedule, 0)
        self._clock = dict.fromkeys(schedule, 0.0)
        self._ends: dict[Action, float] = {}
        self._moving = deque(schedule)
        """Ranks that may be able to go on."""
        self._held_up: set[int] = set()
        """Ranks that wait for receives of what they have sent."""
        self._early: list[tuple[float, int, int]] = []
        """Start, rank and position of actions before which a receive is wanted whose message has not been sent."""

    def finish(self) -> None:
        """Carry every rank on to its end."""
        while True:
            if self._moving:
                self._go_on(self._moving.popleft())
            elif self._held_up:
                for channel in [each for rank in sorted(self._held_up) for each in self._leaving[rank]]:
                    self._post(channel, channel.sent)
                self._held_up.clear()
            elif self._early:
                _, rank, position = heappop(self._early)
                if position == self._at[rank]:
                    self._go_on(rank, with_less=True)
            else:
                return

    def _go_on(self, rank: int, with_less: bool = False) -> None:
        """Do the next action of ``rank``, and those behind it as long as they can be done.

        Args:
            with_less: do the first without the receives that are wanted and whose messages have not been sent.
        """
        actions, arriving, leaving = self._schedule[rank], self._arriving[rank], self._leaving[rank]
        self._held_up.discard(rank)
        while (position := self._at[rank]) < len(actions):
            action = actions[position]
            start = self._start(rank, action)
            if start is None:
                return
            if any(channel.posted < channel.sent for channel in leaving):
                self._held_up.add(rank)
                return
            wanted = [bisect_right(channel.wanted, position) for channel in arriving]
            if not with_less and any(n > channel.sent for n, channel in zip(wanted, arriving, strict=True)):
                heappush(self._early, (start, rank, position))
                return
            with_less = False
            for n, channel in zip(wanted, arriving, strict=True):
                self._post(channel, min(n, channel.sent))
            self._ends[action] = self._clock[rank] = start + SECONDS[action.kind]
            self._at[rank] += 1
            for channel in self._sent[action]:
                channel.sent += 1
                self._moving.append(channel.target)

    def _start(self, rank: int, action: Action) -> float | None:
        """Return when ``action`` starts; None as long as it waits for others."""
        start = self._clock[rank]
        for needed in self._between.computed_before(action):
            end = self._ends.get(needed) or self._ends.get(needed.as_kind(Kind.BACKWARD_INPUT))
            if end is None:
                return None
            start = max(start, end)
        return start

    def _post(self, channel: Channel, upto: int) -> None:
        """Post receives of ``channel``, before the next action of its target."""
        if upto > channel.posted:
            position = self._at[channel.target]
            self.receives[channel.target][position] += channel.receives[channel.posted : upto]
            channel.posted = upto
            self._moving.append(channel.source)


def _wanted(receives: list[Action], positions: Mapping[Action, int]) -> list[int]:
    """One action ahead of their users, and not behind those that come after them."""
    wanted, latest = [], len(positions)
    for receive in reversed(receives):
        needed_at = next(positions[user] for user in users_or_makers(receive) if user in positions)
        latest = min(latest, max(0, needed_at - 1))
        wanted.append(latest)
    return wanted[::-1]
