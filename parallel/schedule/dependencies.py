"""What each compute action of a schedule waits for: others of its rank, and messages.

Takes a schedule, where the stages are and what passes between them; gives, for every compute action, the actions that
must be over before it begins. A receive is over when its message has arrived. In a compute-only schedule the messages
are filled in, as if each were awaited from the beginning of the step.
"""

from __future__ import annotations

from parallel.schedule.action import COMPUTE, PER_PEER, Action, Kind, Schedule
from parallel.schedule.passes import BEGINS_BACKWARD, Links, sends_after
from parallel.schedule.placement import Placement


def with_messages(schedule: Schedule, placement: Placement, links: Links) -> Schedule:
    """``schedule`` itself when it has sends and receives."""
    if any(action.kind in PER_PEER for actions in schedule.values() for action in actions):
        return schedule
    return {
        rank: [receive for action in actions for receive in _receives(action, placement, links)]
        + [each for action in actions for each in (action, *sends_after(action, placement, links))]
        for rank, actions in schedule.items()
    }


def dependencies(schedule: Schedule, placement: Placement, links: Links) -> dict[Action, list[Action]]:
    """Compute action -> what must be over before it.

    Args:
        schedule: with messages. Those of a lowered schedule count, whether ``links`` has them or not; for stages on one
            rank ``links`` says what passes. Where a gradient comes from a stage whose backward pass is split, the list
            names B all the same.
    """
    found: dict[Action, list[Action]] = {}
    everything = [action for actions in schedule.values() for action in actions]
    for action in everything:
        if action.kind in COMPUTE:
            kind = Kind.FORWARD if action.kind is Kind.FORWARD else Kind.BACKWARD
            peers = (peer for peer in _peers(action, links) if _together(action, peer, placement))
            found[action] = [Action(kind, peer, action.microbatch, action.replica) for peer in peers]
            if action.kind is Kind.BACKWARD_WEIGHT:
                found[action].append(Action(Kind.BACKWARD_INPUT, action.stage, action.microbatch, action.replica))
            elif action.kind is not Kind.FORWARD:
                found[action].append(Action(Kind.FORWARD, action.stage, action.microbatch, action.replica))
    users = {Kind.RECEIVE_FORWARD: (Kind.FORWARD,), Kind.RECEIVE_BACKWARD: BEGINS_BACKWARD}
    for receive in everything:
        for kind in users.get(receive.kind, ()):
            user = Action(kind, receive.stage, receive.microbatch, receive.replica)
            if user in found:
                found[user].append(receive)
    return found


def _receives(action: Action, placement: Placement, links: Links) -> list[Action]:
    kind = Kind.RECEIVE_FORWARD if action.kind is Kind.FORWARD else Kind.RECEIVE_BACKWARD
    peers = (peer for peer in _peers(action, links) if not _together(action, peer, placement))
    return [Action(kind, action.stage, action.microbatch, action.replica, peer) for peer in peers]


def _peers(action: Action, links: Links) -> list[int]:
    """Stages whose outputs F needs, or whose gradients B and I need."""
    if action.kind is Kind.FORWARD:
        return [source for source, target in links if target == action.stage]
    if action.kind in BEGINS_BACKWARD:
        return [target for (source, target), back in links.items() if source == action.stage and back]
    return []


def _together(action: Action, peer: int, placement: Placement) -> bool:
    """Whether stage ``peer`` is on the rank of ``action``; groups are alike."""
    return placement.rank_of(peer, action.replica) == placement.rank_of(action.stage, action.replica)
