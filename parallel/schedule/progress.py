"""Running a schedule without computing anything, to see whether it comes to its end.

Takes the actions of every rank, where the stages are and what passes between them; gives where each rank stops, with
sends that return at once and with sends that wait for the receiver. Nothing is timed: an action is over as soon as what
it waits for has happened, so what stops here stops on any machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from parallel.schedule.action import Action, Kind, Schedule
from parallel.schedule.placement import Placement

OTHER_END = {
    Kind.SEND_FORWARD: Kind.RECEIVE_FORWARD,
    Kind.RECEIVE_FORWARD: Kind.SEND_FORWARD,
    Kind.SEND_BACKWARD: Kind.RECEIVE_BACKWARD,
    Kind.RECEIVE_BACKWARD: Kind.SEND_BACKWARD,
}
SENDS = (Kind.SEND_FORWARD, Kind.SEND_BACKWARD)


def other_end(message: Action) -> Action:
    """The receive of a send, the send of a receive."""
    assert message.peer is not None
    return Action(OTHER_END[message.kind], message.peer, message.microbatch, message.replica, message.stage)


@dataclass(frozen=True, slots=True)
class Stop:
    """A rank that never gets past ``position``, where ``action`` waits for all of ``missing``."""

    rank: int
    position: int
    action: Action
    missing: tuple[Action, ...]

    def __str__(self) -> str:
        return f"rank {self.rank}, position {self.position}, {self.action}: {self.reason}"

    @property
    def reason(self) -> str:
        return f"waits for ever for {', '.join(map(str, self.missing))}"


class Progress:
    """A schedule to be run, in which nothing is missing, repeated or, within one rank, before what it needs.

    Args:
        links: (source stage, target stage) -> gradients flow back.
        lowered: values come to other ranks by the messages in the schedule; otherwise as soon as they are computed.
    """

    def __init__(
        self, schedule: Schedule, placement: Placement, links: Mapping[tuple[int, int], bool], *, lowered: bool
    ) -> None:
        self._schedule = schedule
        self._placement = placement
        self._lowered = lowered
        self._rank_of = {action: rank for rank, actions in schedule.items() for action in actions}
        self._sources: dict[int, list[int]] = {}
        self._consumers: dict[int, list[int]] = {}
        for (source, target), differentiable in links.items():
            self._sources.setdefault(target, []).append(source)
            if differentiable:
                self._consumers.setdefault(source, []).append(target)

    def buffered_stops(self) -> list[Stop]:
        """Ranks that do not come to their end when sends and receives return at once and computations wait for the
        values they need."""
        return self._stops(rendezvous=False)

    def rendezvous_stops(self) -> list[Stop]:
        """Ranks that do not come to their end when a send waits until the other rank has come to the receive; receives
        still return at once."""
        return self._stops(rendezvous=True)

    def _stops(self, *, rendezvous: bool) -> list[Stop]:
        done: set[Action] = set()
        reached: set[Action] = set()
        position = dict.fromkeys(self._schedule, 0)

        def missing(action: Action) -> tuple[Action, ...]:
            if action.kind in SENDS:
                return (other_end(action),) if rendezvous and other_end(action) not in reached else ()
            return tuple(needed for needed in self._needed(action) if needed not in done)

        moved = True
        while moved:
            moved = False
            for rank, actions in self._schedule.items():
                while position[rank] < len(actions):
                    action = actions[position[rank]]
                    moved = moved or action not in reached
                    reached.add(action)
                    if missing(action):
                        break
                    done.add(action)
                    position[rank] += 1
                    moved = True
        return [
            Stop(rank, n, self._schedule[rank][n], missing(self._schedule[rank][n]))
            for rank, n in sorted(position.items())
            if n < len(self._schedule[rank])
        ]

    def _needed(self, action: Action) -> list[Action]:
        """What a computation waits for of other stages; what it needs of its own stands before it on its rank."""
        if action.kind is Kind.FORWARD:
            return [self._value(action, source) for source in self._sources.get(action.stage, [])]
        if action.kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT):
            return [self._gradient(action, consumer) for consumer in self._consumers.get(action.stage, [])]
        return []

    def _value(self, forward: Action, source: int) -> Action:
        """What brings the output of stage ``source`` to ``forward``."""
        if self._by_message(forward, source):
            return replace(forward, kind=Kind.SEND_FORWARD, stage=source, peer=forward.stage)
        return replace(forward, stage=source)

    def _gradient(self, backward: Action, consumer: int) -> Action:
        """What brings the gradients that stage ``consumer`` made to ``backward``."""
        if self._by_message(backward, consumer):
            return replace(backward, kind=Kind.SEND_BACKWARD, stage=consumer, peer=backward.stage)
        whole = replace(backward, kind=Kind.BACKWARD, stage=consumer)
        return whole if whole in self._rank_of else replace(whole, kind=Kind.BACKWARD_INPUT)

    def _by_message(self, action: Action, stage: int) -> bool:
        rank = self._rank_of[action]
        group = self._placement.group_of(rank)
        return self._lowered and self._placement.rank_of(stage, action.replica, group) != rank
