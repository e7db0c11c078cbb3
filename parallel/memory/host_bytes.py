"""Bytes on the host: what activations that were moved there take at most, by rank, for any schedule.

Takes a partition of a graph that was traced with its loss, the schedule and an ``ActivationPolicy``. Counted are the
buffers of the host's pool, which are up to a ninth larger than what lies in them. No torch here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from parallel.graph.partition import Partition
from parallel.memory.kept_bytes import lifetimes_of
from parallel.memory.lifetimes import Lifetimes
from parallel.memory.liveness import Piece
from parallel.memory.policy import ActivationPolicy
from parallel.schedule.action import COMPUTE, Action, Kind, Schedule


@dataclass(frozen=True)
class HostBytes:
    """What a stage holds on the host of one microbatch of the traced size.

    Attributes:
        kept: between its forward and its backward pass.
        inputs: when the whole stage is to be computed again.
        again: besides, at most, in a backward pass in which segments are computed again.
    """

    kept: int
    inputs: int
    again: int


def stage_host_bytes(
    partition: Partition, policy: ActivationPolicy, known: Iterable[Piece] | None = None
) -> list[HostBytes]:
    """Return the bytes of every stage.

    Args:
        known: what ``pieces`` gives for the graph, where it is known.
    """
    return [host_bytes_of(lives) for lives in lifetimes_of(partition, policy, known)]


def host_bytes_of(lives: Lifetimes) -> HostBytes:
    """Return the bytes of a stage whose pieces of memory live so."""
    return HostBytes(lives.host, lives.host_inputs, lives.host_again)


def host_bytes(schedule: Schedule, stages: Sequence[HostBytes], weights: Sequence[float] | None = None) -> list[int]:
    """Return the bytes of every rank in ``schedule`` at the fullest moment of a step.

    Args:
        schedule: compute-only, with recomputation where it is done, or lowered.
        stages: what ``stage_host_bytes`` gives.
        weights: of the microbatches by number, as parts of the largest; 1 each by default.
    """
    return [_fullest(actions, stages, weights) for _, actions in sorted(schedule.items())]


def _fullest(actions: Sequence[Action], stages: Sequence[HostBytes], weights: Sequence[float] | None) -> int:
    actions = [action for action in actions if action.kind in COMPUTE]
    put_off = {a.key for a in actions if a.kind is Kind.RECOMPUTE}
    last = Kind.BACKWARD_WEIGHT if any(a.kind is Kind.BACKWARD_WEIGHT for a in actions) else Kind.BACKWARD
    now = most = 0.0
    for action in actions:
        stage = stages[action.stage]
        weight = 1.0 if weights is None else weights[action.i]
        during = 0.0
        if action.kind is Kind.FORWARD:
            again = action.key in put_off
            now += (stage.inputs if again else stage.kept) * weight
        elif action.kind is Kind.RECOMPUTE:
            now += (stage.kept - stage.inputs) * weight
        else:
            during = stage.again * weight
        most = max(most, now + during)
        if action.kind is last:
            now -= stage.kept * weight
    return round(most)
