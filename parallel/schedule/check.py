"""Proof, before the first step, that a schedule computes what the model is and comes to its end.

Progress alone does not prove a schedule right: a backward pass may stand before its forward pass and still block no
rank. So ownership, completeness and order are proved first, and one error has every fault. Between two ranks, receives
stand in the order of the sends, so that channels without tags (NCCL) deliver the right message.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from parallel.schedule.action import BEGINS_BACKWARD, COMPUTE, PER_PEER, SENDS, Action, Kind, Schedule
from parallel.schedule.dependencies import Dependencies, Links, begin_times, peer_rank, users_or_makers
from parallel.schedule.mesh import Mesh
from parallel.schedule.text import ScheduleError, ScheduleFault

EARLIER = {
    Kind.BACKWARD: (Kind.FORWARD, Kind.RECOMPUTE, Kind.OFFLOAD, Kind.PREFETCH),
    Kind.BACKWARD_INPUT: (Kind.FORWARD, Kind.RECOMPUTE, Kind.OFFLOAD, Kind.PREFETCH),
    Kind.BACKWARD_WEIGHT: (Kind.FORWARD, Kind.RECOMPUTE, Kind.BACKWARD_INPUT),
    Kind.RECOMPUTE: (Kind.FORWARD, Kind.OFFLOAD, Kind.PREFETCH),
    Kind.OFFLOAD: (Kind.FORWARD,),
    Kind.PREFETCH: (Kind.FORWARD, Kind.OFFLOAD),
    Kind.UPDATE: (Kind.BACKWARD, Kind.BACKWARD_WEIGHT),
}
"""What stands before an action of the same stage and microbatch, where it stands at all."""


def check(schedule: Schedule, mesh: Mesh, links: Links) -> None:
    """Prove ``schedule`` right.

    Args:
        schedule: compute-only, or with messages and sums of gradients; a receive means to begin to receive.
        links: (source stage, target stage) -> gradients flow back.

    Raises:
        ScheduleError: it is not; has every fault, and the grid with the first faulty cell marked. Whether the schedule
            comes to its end is tried only when nothing else is wrong.
    """
    lowered = any(action.kind not in COMPUTE for row in schedule.values() for action in row)
    misplaced = [*_owners(schedule, mesh)]
    faults = [*_ranks(schedule, mesh), *misplaced, *_repeats(schedule), *_complete(schedule, mesh), *_order(schedule)]
    if lowered and not misplaced:
        faults += _Channels(schedule, mesh, links).faults()
    faults = faults or [*_stops(schedule, Dependencies(mesh, links), lowered=lowered)]
    if faults:
        raise ScheduleError(schedule, faults)


def _ranks(schedule: Schedule, mesh: Mesh) -> Iterator[ScheduleFault]:
    size = f"{mesh.groups} x {mesh.depth} ranks"
    for rank in sorted(schedule.keys() ^ set(range(mesh.teams))):
        yield ScheduleFault(f"has {'a' if rank in schedule else 'no'} row in the schedule, which is for {size}", rank)


def _owners(schedule: Schedule, mesh: Mesh) -> Iterator[ScheduleFault]:
    """Every action stands on the rank that holds its stage, and names stages that there are."""
    for rank, n, action in _cells(schedule):
        stages = (action.stage, action.stage if action.peer is None else action.peer)
        if not (0 <= min(stages) <= max(stages) < mesh.stages and 0 <= action.replica < mesh.replicas):
            text = f"there are {mesh.stages} stages in {mesh.replicas} replicas, counted from 0"
            yield ScheduleFault(text, rank, n, action)
        elif (owner := _owner(action, mesh, rank // mesh.depth)) != rank:
            text = f"stage {action.stage} of replica {action.replica} is on rank {owner} of this group"
            yield ScheduleFault(text, rank, n, action)


def _repeats(schedule: Schedule) -> Iterator[ScheduleFault]:
    seen: dict[Action, tuple[int, int]] = {}
    for rank, n, action in _cells(schedule):
        if action.kind is not Kind.REDUCE:
            before = seen.setdefault(action, (rank, n))
            if before != (rank, n):
                yield ScheduleFault(f"stands on rank {before[0]}, position {before[1]} already", rank, n, action)


def _complete(schedule: Schedule, mesh: Mesh) -> Iterator[ScheduleFault]:
    """Each microbatch goes forward and backward through all stages of one replica of one group."""
    present = {action for _, _, action in _cells(schedule)}
    updates = any(action.kind is Kind.UPDATE for action in present)
    homes: dict[int, tuple[int, int]] = {}
    for rank, n, action in _cells(schedule):
        if action.microbatch is None:
            continue
        here = (rank // mesh.depth, action.replica)
        home = homes.setdefault(action.microbatch, here)
        if here != home:
            text = f"is in group {home[0]}, replica {home[1]}, not in {here[0]}, {here[1]}"
            yield ScheduleFault(f"microbatch {action.microbatch} {text}", rank, n, action)
    if not homes:
        yield ScheduleFault("no microbatch is computed")
    for i in sorted(set(range(max(homes, default=0))) - set(homes)):
        yield ScheduleFault(f"microbatch {i} is not computed; microbatches are counted from 0")
    for i, (group, replica) in sorted(homes.items()):
        for stage in range(mesh.stages):
            forward = Action(Kind.FORWARD, stage, i, replica)
            whole, *both = map(forward.as_kind, (Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT))
            halves = present.intersection(both)
            update = [forward.as_kind(Kind.UPDATE)] if updates else []  # of every microbatch, or after all of them
            for action in (forward, *(both if halves else [whole]), *update):
                if action not in present:
                    yield ScheduleFault("is missing", _owner(action, mesh, group), None, action)
            if halves and whole in present:
                text = f"is there, and {' and '.join(sorted(map(str, halves)))} too: one backward pass a microbatch"
                yield ScheduleFault(text, _owner(whole, mesh, group), None, whole)


def _order(schedule: Schedule) -> Iterator[ScheduleFault]:
    """Within a stage: F before B, I before W, a recomputation between F and B."""
    for rank, actions in schedule.items():
        position = {action: n for n, action in enumerate(actions)}
        for n, action in enumerate(actions):
            for kind in EARLIER.get(action.kind, ()):
                earlier = action.as_kind(kind)
                if position.get(earlier, n) > n:
                    yield ScheduleFault(f"stands before {earlier}, position {position[earlier]}", rank, n, action)


def _owner(action: Action, mesh: Mesh, group: int) -> int:
    return mesh.team_at(action.stage, action.replica, group)


def _cells(schedule: Schedule) -> Iterator[tuple[int, int, Action]]:
    return ((rank, n, action) for rank, actions in schedule.items() for n, action in enumerate(actions))


def _stops(schedule: Schedule, between: Dependencies, *, lowered: bool) -> Iterator[ScheduleFault]:
    """Yield where ranks stop for ever; unless ``lowered``, values come to other ranks as soon as they are computed."""
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


class _Channels:
    """The messages of one schedule, and the sums of gradients."""

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
        """A stage with copies on several ranks is summed as often on each, and after its last backward pass there."""
        counts: dict[int, tuple[int, int]] = {}
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
                first, count = counts.setdefault(stage, (rank, len(sums)))
                for n, action in sums[-1:]:
                    if n < last:
                        yield ScheduleFault(f"stands before the last backward pass, {actions[last]}", rank, n, action)
                    elif len(sums) != count:
                        text = f"rank {first} sums the stage's gradients {count}x, this rank {len(sums)}x"
                        yield ScheduleFault(text, rank, n, action)

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
