"""Dependencies between actions: the one table behind ``passes``, ``check`` and ``simulate``.

F needs the outputs of the stages before it, B and I the gradients of the stages after it: from the same rank as soon as
they are computed, from other ranks by a message.
"""

from __future__ import annotations

import itertools
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from heapq import heappop, heappush
from types import MappingProxyType

from parallel.schedule.action import BEGINS_BACKWARD, COMPUTE, PER_PEER, Action, Kind, Schedule
from parallel.schedule.mesh import Mesh
from parallel.schedule.timeline import StageCost, seconds_by_kind

Links = Mapping[tuple[int, int], bool]
"""(source stage, target stage) -> gradients flow back along it. Skips are links like any other."""

SECONDS = seconds_by_kind(StageCost(1.0, 2.0, 1.0, 1.0, 0))
"""Of the actions of any stage, to say which of two comes first."""

_PART_BEFORE = {Kind.BACKWARD_WEIGHT: Kind.BACKWARD_INPUT, Kind.UPDATE: Kind.BACKWARD}
"""What a computation follows on its own rank, where that is not the forward pass."""


def users_or_makers(message: Action) -> tuple[Action, ...]:
    """Return the computations of which one uses what a receive brings, or makes what a send sends."""
    forward = message.kind in (Kind.SEND_FORWARD, Kind.RECEIVE_FORWARD)
    return tuple(message.as_kind(kind) for kind in ((Kind.FORWARD,) if forward else BEGINS_BACKWARD))


def peer_rank(message: Action, mesh: Mesh, rank: int) -> int:
    """Return the rank at the other end of a send or receive of ``rank``."""
    assert message.peer is not None
    return mesh.peer_team(rank, message.peer, message.replica)


def begin_times(
    schedule: Schedule,
    needed: Callable[[Action, int], Sequence[Action]],
    wished: Mapping[Action, Sequence[Action]] = MappingProxyType({}),
) -> dict[Action, float]:
    """Return when each action begins that ever does, if all stages are equally long and messages take no time; those
    that begin at the same time in an order in which ranks can do them one after the other.

    Args:
        needed: (action, rank) -> what must be over before the action begins, besides those before it on its rank. B of
            a stage whose backward pass is split is over with I.
        wished: what an action had better not begin before: it does only where no rank could go on otherwise, the
            earliest first.
    """
    begins: dict[Action, float] = {}
    ends: dict[Action, float] = {}
    at, clock = dict.fromkeys(schedule, 0), dict.fromkeys(schedule, 0.0)
    waiting: dict[Action, list[int]] = defaultdict(list)  # for an action, the ranks
    known: dict[int, Sequence[Action]] = {}  # rank -> what the action needs that it waits to do
    ready = deque(schedule)
    wishing: list[tuple[float, int, int]] = []  # begin, rank and position of actions
    while ready or wishing:
        early = not ready
        rank = heappop(wishing)[1] if early else ready.popleft()
        for action in itertools.islice(schedule[rank], at[rank], None):
            before = known[rank] = known.get(rank) or needed(action, rank)
            if absent := [each for each in before if each not in ends]:
                waiting[absent[0]].append(rank)
                break
            begin = max([clock[rank], *(ends[each] for each in before)])
            wishes = wished.get(action, ())
            if not early and (absent := [each for each in wishes if each not in begins]):
                waiting[absent[0]].append(rank)
                heappush(wishing, (begin, rank, at[rank]))
                break
            begin = max([begin, *(begins[each] for each in wishes if each in begins)])
            early = False
            del known[rank]
            begins[action] = begin
            clock[rank] = begin + SECONDS.get(action.kind, 0.0)
            at[rank] += 1
            whole = [action.as_kind(Kind.BACKWARD)] if action.kind is Kind.BACKWARD_INPUT else []
            for each in (action, *whole):
                ends[each] = clock[rank]
                ready += waiting.pop(each, ())
        while wishing and at[wishing[0][1]] != wishing[0][2]:
            heappop(wishing)
    return begins


class Dependencies:
    """Values and gradients that pass between the stages of a mesh."""

    def __init__(self, mesh: Mesh, links: Links) -> None:
        self._mesh = mesh
        empty = [defaultdict[int, list[int]](list) for _ in range(4)]
        self._sources, self._targets, self._sources_back, self._targets_back = empty
        for (source, target), back in links.items():
            self._sources[target].append(source)
            self._targets[source].append(target)
            if back:
                self._sources_back[target].append(source)
                self._targets_back[source].append(target)

    def receives_before(self, action: Action, rank: int) -> list[Action]:
        """Return the messages from other ranks that ``action`` of ``rank`` needs."""
        kind = Kind.RECEIVE_FORWARD if action.kind is Kind.FORWARD else Kind.RECEIVE_BACKWARD
        return [action.as_kind(kind, peer) for peer in self._makers(action) if not self._on(rank, peer, action)]

    def computed_before(self, action: Action, rank: int | None = None) -> list[Action]:
        """Return the computations of other stages that ``action`` needs: of those on ``rank``, or wherever they are.

        Where a gradient comes from a stage whose backward pass is split, the list names B all the same.
        """
        kind = Kind.FORWARD if action.kind is Kind.FORWARD else Kind.BACKWARD
        return [
            Action(kind, peer, action.microbatch, action.replica)
            for peer in self._makers(action)
            if rank is None or self._on(rank, peer, action)
        ]

    def sends_after(self, action: Action, rank: int) -> list[Action]:
        """Return what ``action`` of ``rank`` makes for other ranks, the nearest stage first: it waits for it."""
        if action.kind is Kind.FORWARD:
            kind, peers = Kind.SEND_FORWARD, sorted(self._targets.get(action.stage, ()))
        elif action.kind in BEGINS_BACKWARD:
            kind, peers = Kind.SEND_BACKWARD, sorted(self._sources_back.get(action.stage, ()), reverse=True)
        else:
            return []
        return [action.as_kind(kind, peer) for peer in peers if not self._on(rank, peer, action)]

    def with_messages(self, schedule: Schedule) -> Schedule:
        """Return a compute-only ``schedule`` with its messages, each awaited from the beginning of the step; one that
        has sends and receives as it is."""
        if any(action.kind in PER_PEER for actions in schedule.values() for action in actions):
            return schedule
        return {
            rank: [receive for action in actions for receive in self.receives_before(action, rank)]
            + [each for action in actions for each in (action, *self.sends_after(action, rank))]
            for rank, actions in schedule.items()
        }

    def all_before(self, schedule: Schedule) -> dict[Action, list[Action]]:
        """Return, for each compute action, what must be over before it begins; a receive is when its message is there.

        Args:
            schedule: with messages. They count whether ``links`` has them or not.
        """
        before: dict[Action, list[Action]] = {}
        for rank, actions in schedule.items():
            for action in actions:
                if action.kind in COMPUTE:
                    before[action] = self.computed_before(action, rank)
                    if action.kind is not Kind.FORWARD:
                        before[action].append(action.as_kind(_PART_BEFORE.get(action.kind, Kind.FORWARD)))
        for actions in schedule.values():
            for receive in actions:
                if receive.kind in (Kind.RECEIVE_FORWARD, Kind.RECEIVE_BACKWARD):
                    for user in users_or_makers(receive):
                        if user in before:
                            before[user].append(receive)
        return before

    def _makers(self, action: Action) -> list[int]:
        """Stages whose outputs F needs, or whose gradients B and I need."""
        if action.kind is Kind.FORWARD:
            return self._sources.get(action.stage, [])
        return self._targets_back.get(action.stage, []) if action.kind in BEGINS_BACKWARD else []

    def _on(self, rank: int, stage: int, action: Action) -> bool:
        """Return whether ``stage`` of the action's replica is on ``rank``."""
        return self._mesh.peer_team(rank, stage, action.replica) == rank
