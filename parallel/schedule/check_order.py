"""Order between ranks: messages of a schedule arrive, in time and in the order of the sends, and no rank is stuck.

Between two ranks, receives stand in the order of the sends, so that channels without tags (NCCL) deliver the right
message. Ranks that hold copies of the same stages begin to sum their gradients in the same order.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from parallel.schedule.action import BEGINS_BACKWARD, PER_PEER, SENDS, Action, Kind, Schedule
from parallel.schedule.dependencies import Dependencies, Links, begin_times, peer_rank, users_or_makers
from parallel.schedule.mesh import Mesh
from parallel.schedule.text import ScheduleFault


def stops(schedule: Schedule, between: Dependencies, *, lowered: bool) -> Iterator[ScheduleFault]:
    """Yield where ranks stop for ever if sends return immediately and computations wait for the values that they need.

    Args:
        schedule: nothing in it is missing, repeated or, within one rank, before what it needs.
        lowered: values come to other ranks by the messages in the schedule; otherwise as soon as they are computed.
    """
    actions = {action for row in schedule.values() for action in row}

    def needed(action: Action, rank: int) -> list[Action]:
        if not lowered:
            return between.computed_before(action)
        receives = between.receives_before(action, rank)
        return between.computed_before(action, rank) + [receive.other_end for receive in receives]

    begun = begin_times(schedule, needed)
    over = begun.keys() | {action.as_kind(Kind.BACKWARD) for action in begun if action.kind is Kind.BACKWARD_INPUT}
    for rank, row in sorted(schedule.items()):
        position = next((n for n, action in enumerate(row) if action not in begun), None)
        if position is not None:
            absent = [each for each in needed(row[position], rank) if each not in over]
            names = (str(each if each in actions else each.as_kind(Kind.BACKWARD_INPUT)) for each in absent)
            yield ScheduleFault(f"waits for ever for {', '.join(names)}", rank, position, row[position])


class Channels:
    """The messages of one schedule.

    Args:
        links: (source stage, target stage) -> gradients flow back.
    """

    def __init__(self, schedule: Schedule, mesh: Mesh, links: Links) -> None:
        self._schedule = schedule
        self._mesh = mesh
        self._links = links
        self._between = Dependencies(mesh, links)
        self._position = {
            (rank, action): n for rank, actions in schedule.items() for n, action in reversed([*enumerate(actions)])
        }

    def faults(self) -> list[ScheduleFault]:
        """All that is wrong with messages and sums; nothing is said about actions that another rank should have."""
        return [*self._pairs(), *self._times(), *self._order(), *self._sums(), *self._order_of_sums()]

    def _pairs(self) -> Iterator[ScheduleFault]:
        """Every message follows a link and has its other end."""
        for rank, n, message, other in self._messages():
            assert message.peer is not None
            ahead = message.kind in (Kind.SEND_FORWARD, Kind.RECEIVE_BACKWARD)
            source, target = (message.stage, message.peer) if ahead else (message.peer, message.stage)
            forward = message.kind in (Kind.SEND_FORWARD, Kind.RECEIVE_FORWARD)
            text = ""
            if (source, target) not in self._links:
                text = f"nothing passes from stage {source} to stage {target}"
            elif not forward and not self._links[source, target]:
                text = f"no gradient flows from stage {target} back to stage {source}"
            elif other == rank:
                text = f"stage {message.peer} is on this rank too: nothing to send"
            elif (other, message.other_end) not in self._position:
                text = f"{message.other_end} is missing on rank {other}"
            if text:
                yield ScheduleFault(text, rank, n, message)

    def _times(self) -> Iterator[ScheduleFault]:
        """A receive stands before the computation that needs it, a send after the one that makes it."""
        for rank, actions in self._schedule.items():
            for n, action in enumerate(actions):
                for receive in self._between.receives_before(action, rank):
                    sender = peer_rank(receive, self._mesh, rank)
                    stands = self._position.get((rank, receive))
                    if stands is None and (sender, receive.other_end) not in self._position:
                        yield ScheduleFault(f"{receive} is missing, and its send on rank {sender}", rank, n, action)
                    elif stands is not None and stands > n:
                        yield ScheduleFault(f"stands before {receive}, which it needs", rank, n, action)
                if action.kind in SENDS:
                    made = [self._position.get((rank, maker)) for maker in users_or_makers(action)]
                    if all(stands is None or stands > n for stands in made):
                        yield ScheduleFault("stands before the computation that makes what it sends", rank, n, action)

    def _order(self) -> Iterator[ScheduleFault]:
        """First in, first out, between each ordered pair of ranks."""
        sent: dict[tuple[int, int], list[Action]] = defaultdict(list)
        received: dict[tuple[int, int], list[tuple[int, Action]]] = defaultdict(list)
        for rank, n, message, other in self._messages():
            if (other, message.other_end) in self._position:
                if message.kind in SENDS:
                    sent[rank, other].append(message.other_end)
                else:
                    received[other, rank].append((n, message))
        for (source, target), receives in sorted(received.items()):
            for (n, message), expected in zip(receives, sent[source, target], strict=False):
                if message != expected:
                    yield ScheduleFault(f"rank {source} sends {expected.other_end} before that", target, n, message)
                    break

    def _sums(self) -> Iterator[ScheduleFault]:
        """A stage with copies on several ranks is summed once on each, after its last backward pass there."""
        backward = (*BEGINS_BACKWARD, Kind.BACKWARD_WEIGHT)
        for rank, actions in self._schedule.items():
            # A rank with both replicas of a stage has one copy of its parameters.
            for stage, replica in dict(reversed(self._mesh.held_by(rank))).items():
                if len(self._mesh.ranks_with(stage)) == 1:
                    continue
                sums = [(n, a) for n, a in enumerate(actions) if a.kind is Kind.REDUCE and a.stage == stage]
                last = max((n for n, a in enumerate(actions) if a.kind in backward and a.stage == stage), default=-1)
                if not sums:
                    missing = Action(Kind.REDUCE, stage, None, replica)
                    yield ScheduleFault("is missing: other ranks hold copies of the stage", rank, None, missing)
                for n, action in sums[:1]:
                    if n < last:
                        yield ScheduleFault(f"stands before the last backward pass, {actions[last]}", rank, n, action)
                for n, action in sums[1:]:
                    yield ScheduleFault("the stage's gradients are summed a second time", rank, n, action)

    def _order_of_sums(self) -> Iterator[ScheduleFault]:
        """Ranks that sum the same stages do it in the same order."""
        first: dict[tuple[int, ...], tuple[int, list[int]]] = {}
        for rank, actions in sorted(self._schedule.items()):
            mine: dict[tuple[int, ...], list[tuple[int, Action]]] = {}
            for n, action in enumerate(actions):
                if action.kind is Kind.REDUCE:
                    mine.setdefault(self._mesh.teams_with(action.stage), []).append((n, action))
            for holders, sums in mine.items():
                stages = [action.stage for _, action in sums]
                first_rank, expected = first.setdefault(holders, (rank, stages))
                if stages != expected and sorted(stages) == sorted(expected):
                    n, action = next(cell for cell, stage in zip(sums, expected, strict=True) if cell[1].stage != stage)
                    text = f"rank {first_rank} sums stages {expected} in this order, this rank {stages}"
                    yield ScheduleFault(text, rank, n, action)

    def _messages(self) -> Iterator[tuple[int, int, Action, int]]:
        """Yield (rank, position, message, rank at its other end) of all."""
        for rank, actions in self._schedule.items():
            for n, action in enumerate(actions):
                if action.kind in PER_PEER:
                    yield rank, n, action, peer_rank(action, self._mesh, rank)
