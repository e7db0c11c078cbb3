"""Proof, before any process starts, that a schedule computes what the model is and comes to its end.

Progress alone does not prove a schedule right: a backward pass may stand before its forward pass and still block no
rank. So ownership, completeness and order are proved first, and one error has every fault.
"""

from __future__ import annotations

from collections.abc import Iterator

from parallel.schedule.action import COMPUTE, Action, Kind, Schedule
from parallel.schedule.check_order import Channels, stops
from parallel.schedule.dependencies import Dependencies, Links
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
        faults += Channels(schedule, mesh, links).faults()
    faults = faults or [*stops(schedule, Dependencies(mesh, links), lowered=lowered)]
    if faults:
        raise ScheduleError(schedule, faults)


def _ranks(schedule: Schedule, mesh: Mesh) -> Iterator[ScheduleFault]:
    size = f"{mesh.groups} x {mesh.depth} ranks"
    for rank in sorted(set(range(mesh.teams)) - set(schedule)):
        yield ScheduleFault(f"has no row in the schedule, which is for {size}", rank)
    for rank in sorted(set(schedule) - set(range(mesh.teams))):
        yield ScheduleFault(f"has a row in the schedule, which is for {size}", rank)


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
