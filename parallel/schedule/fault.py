"""What is said when a rank fails, from the schedule and where in it the rank was.

Gives one message: rank, cause, step, action with stage and shapes, what to do, and the grid of actions with the failing
cell marked.
"""

from __future__ import annotations

from parallel.schedule.action import Action, Kind, Schedule
from parallel.schedule.text import format_grid

AROUND = 4
"""Cells of the grid shown on each side of the failing one."""

_DOES = {
    Kind.FORWARD: "forward pass of microbatch {i} through stage {k}{replica}",
    Kind.BACKWARD: "backward pass of microbatch {i} through stage {k}{replica}",
    Kind.BACKWARD_INPUT: "backward pass of microbatch {i} through stage {k}{replica}, gradients of its inputs",
    Kind.BACKWARD_WEIGHT: "backward pass of microbatch {i} through stage {k}{replica}, gradients of its parameters",
    Kind.RECOMPUTE: "second forward pass of microbatch {i} through stage {k}{replica}, to recompute what it saves",
    Kind.OFFLOAD: "moving what microbatch {i} keeps of stage {k}{replica} to the host",
    Kind.PREFETCH: "bringing back from the host what microbatch {i} keeps of stage {k}{replica}",
    Kind.SEND_FORWARD: "sending what stage {k}{replica} made of microbatch {i} to stage {peer}",
    Kind.RECEIVE_FORWARD: "receiving what stage {peer} made of microbatch {i} for stage {k}{replica}",
    Kind.SEND_BACKWARD: "sending gradients of microbatch {i} from stage {k}{replica} back to stage {peer}",
    Kind.RECEIVE_BACKWARD: "receiving gradients of microbatch {i} from stage {peer} for stage {k}{replica}",
    Kind.REDUCE: "summing the gradients of stage {k}{replica} over the ranks that hold a copy of it",
}


def describe_action(action: Action, replicas: bool = False) -> str:
    """``action`` in words.

    Args:
        replicas: name the replica even when it is the first.
    """
    replica = f" of replica {action.replica}" if replicas or action.replica else ""
    return _DOES[action.kind].format(i=action.microbatch, k=action.stage, replica=replica, peer=action.peer)


def describe_fault(
    schedule: Schedule | None,
    rank: int,
    position: int | None,
    step: int,
    shapes: str,
    reason: str,
    advice: str = "",
) -> str:
    """The one message of a run in which ``rank`` failed.

    Args:
        schedule: what the ranks do in a step; None where a step is not made of actions (data parallelism).
        position: of the action in ``schedule[rank]``; None or -1 when the rank was at none.
        step: from 0, told from 1 as in the run's other output; -1 before the first.
        shapes: of the action's tensors, such as "inputs (2, 256, 64, 64) float32"; may be empty.
        reason: what follows "rank 2", such as "was killed (signal 9)".
        advice: what the user can do about it.

    Returns:
        Lines: what happened and where; ``advice``; the grid around the failing cell.
    """
    where = f"at step {step + 1}" if step >= 0 else "before the first step"
    head = f"rank {rank} {reason} {where}"
    if schedule is None or position is None or position < 0:
        if schedule is not None and step >= 0:
            head += ", between actions"
        return "\n".join(filter(None, (head, advice)))
    action = schedule[rank][position]
    replicas = any(other.replica for actions in schedule.values() for other in actions)
    head += f" in {action}: {describe_action(action, replicas)}" + (f", {shapes}" if shapes else "")
    return "\n".join(filter(None, (head, advice, format_grid(schedule, mark=(rank, position), around=AROUND))))
