"""Running a schedule without computing anything, to see whether it comes to its end.

Takes the actions of every rank, where the stages are and what passes between them; gives where each rank stops, with
sends that return at once and with sends that wait for the receiver. Nothing is timed: an action is over as soon as what
it waits for has happened, so what stops here stops on any machine.
"""

from __future__ import annotations

from dataclasses import dataclass

from parallel.schedule.action import SENDS, Action, Kind, Schedule
from parallel.schedule.dependencies import Dependencies, Links
from parallel.schedule.placement import Placement


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

    def __init__(self, schedule: Schedule, placement: Placement, links: Links, *, lowered: bool) -> None:
        self._schedule = schedule
        self._between = Dependencies(placement, links)
        self._lowered = lowered
        self._actions = {action for actions in schedule.values() for action in actions}

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

        def missing(action: Action, rank: int) -> tuple[Action, ...]:
            if action.kind in SENDS:
                return (action.other_end,) if rendezvous and action.other_end not in reached else ()
            return tuple(needed for needed in self._needed(action, rank) if needed not in done)

        moved = True
        while moved:
            moved = False
            for rank, actions in self._schedule.items():
                while position[rank] < len(actions):
                    action = actions[position[rank]]
                    moved = moved or action not in reached
                    reached.add(action)
                    if missing(action, rank):
                        break
                    done.add(action)
                    position[rank] += 1
                    moved = True
        return [
            Stop(rank, n, self._schedule[rank][n], missing(self._schedule[rank][n], rank))
            for rank, n in sorted(position.items())
            if n < len(self._schedule[rank])
        ]

    def _needed(self, action: Action, rank: int) -> list[Action]:
        """What a computation waits for of other stages; what it needs of its own stands before it on its rank."""
        computed = self._between.computed_before(action, rank if self._lowered else None)
        needed = [each if each in self._actions else each.as_kind(Kind.BACKWARD_INPUT) for each in computed]
        if self._lowered:
            needed += [receive.other_end for receive in self._between.receives_before(action, rank)]
        return needed
