"""Bytes that each rank takes at most in a training step, on its device and on the host, before it is run.

Takes the bytes of stages, the schedule and the optimizer; gives ``RankBytes``. The actions of a rank are gone through
one by one: what microbatches in flight keep, what is live only while an action runs (``stage_bytes``), and messages,
which are received one action ahead and leave during the next. Buffers of modules, a few numbers per channel,
are not counted. No torch here.

With ZeRO (Rajbhandari et al. 2020, section 5; stage 3 is ``sharded_bytes``) holders of a stage divide gradients and
optimizer state as in the table of docs/design/memory.md.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from parallel.memory.offload_window import HostBytes
from parallel.memory.stage_bytes import StageBytes
from parallel.schedule.action import BEGINS_BACKWARD, Action, Held, Kind, Schedule, held, versions
from parallel.schedule.mesh import Mesh

BUCKET_BYTES = 25 << 20
"""Default size of gradients that are summed in one operation."""
IN_FLIGHT = 1
"""Buckets of slices whose sums are under way while the next one fills."""
UPDATE_COPIES = (0, 1, 2, 2)
"""By values that the optimizer keeps for each parameter: copies of one parameter that torch's update on a CPU makes on
its way (``torch/optim``). SGD's decayed gradient; AdamW's root of the second moment and, beside it, the quotient. A
running average is added in place; SGD with one is counted as AdamW."""


@dataclass(frozen=True)
class RankBytes:
    """Bytes of one rank at the fullest moment of a step.

    Attributes:
        activations: saved for backward passes to come, that under way included.
        transient: live only while the action runs: values and gradients on their way, gradients of a layer's
            parameters before they are added, and what the update works out.
        boundary: messages received ahead, and such that have not left.
        communication: what NCCL allocates.
    """

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    transient: int
    boundary: int
    communication: int = 0

    @property
    def total(self) -> int:
        model = self.parameters + self.gradients + self.optimizer
        return model + self.activations + self.transient + self.boundary + self.communication


def in_flight(schedule: Schedule, mesh: Mesh) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Return, by rank of the first group, the combinations of numbers of microbatches in flight that it comes to.

    Returns:
        Of each rank those that no other one exceeds; a number for each stage the rank holds, in ascending order.
    """
    combinations = []
    for rank in range(mesh.depth):
        stages = sorted({stage for stage, _ in mesh.held_by(rank)})
        now = dict.fromkeys(stages, 0)
        reached: dict[tuple[int, ...], None] = {}
        for action, before, after in held(schedule[rank]):
            now[action.stage] += bool(after) - bool(before)
            if action.kind is Kind.FORWARD:
                reached[tuple(now.values())] = None
        most: list[tuple[int, ...]] = []
        for numbers in sorted(reached, key=sum, reverse=True):  # what exceeds others comes before them
            if not any(_exceeds(other, numbers) for other in most):
                most.append(numbers)
        combinations.append(tuple(numbers for numbers in reached if numbers in most))
    return tuple(combinations)


def _exceeds(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    return one != other and all(a >= b for a, b in zip(one, other, strict=True))


def rank_bytes(
    stages: Sequence[StageBytes] | Mapping[int, StageBytes],
    mesh: Mesh,
    schedule: Schedule,
    *,
    slots: int,
    zero: int = 0,
    copies: int = 1,
    weights: Sequence[float] | None = None,
    device: str = "cpu",
) -> list[RankBytes]:
    """Return the bytes of every rank in ``schedule``.

    Args:
        stages: for the largest microbatch, at least those that the ranks of ``schedule`` hold.
        schedule: compute-only, with recomputation where it is done, or lowered.
        slots: values that the optimizer keeps for each parameter: 1 for momentum, 2 for Adam.
        zero: as of ``Strategy``.
        copies: ranks that hold a stage for each team of ``mesh`` that does: members, and groups it does not have.
        weights: of the microbatches by number, as parts of the largest; 1 each by default.
        device: kind of device, "cpu" or "cuda", which the optimizer's own memory depends on.
    """

    held_here = {stage for rank in schedule for stage, _ in mesh.held_by(rank)}
    holders = {stage: len(mesh.teams_with(stage)) * copies for stage in held_here}

    def slice_of(stage: int) -> int:
        return -(-stages[stage].parameters // (holders[stage] if zero else 1))

    def fullest(rank: int, actions: Sequence[Action]) -> RankBytes:
        of_rank = sorted({stage for stage, _ in mesh.held_by(rank)})
        updates = any(action.kind is Kind.UPDATE for action in actions)
        single = sum(stages[stage].parameters for stage in of_rank)
        parameters = single * (versions(actions)[1] if updates else 1)  # one stage a rank, where microbatches update it
        sliced = sum(map(slice_of, of_rank))
        largest = max((min(stages[stage].largest_parameter, slice_of(stage)) for stage in of_rank), default=0)
        update = _update(single, sliced, slots, largest, device)
        divided = {stage for stage in of_rank if zero and holders[stage] > 1}
        if divided:  # parameters are gathered bucket by bucket
            gathered = max(min(stages[stage].parameters, _bucket(stages[stage])) for stage in divided)
            update = dataclasses.replace(
                update, transient=max(update.transient, gathered + sliced * gathered // max(1, single))
            )
        # Gradients that are summed whole lie in buckets from the beginning; others are made by the first backward.
        gradients = {s: stages[s].parameters for s in of_rank if holders[s] > 1 and s not in divided}
        steps = list(held(actions))
        backwards = Counter(action.stage for action, _, _ in steps if action.kind in BEGINS_BACKWARD)
        by_bucket = {s for s in divided if mesh.replicas == 1 and (zero == 2 or backwards[s] == 1)}
        scales = [1.0 if weights is None else weights[action.i] for action, _, _ in steps]
        # By action: messages that it waits for, and that it has made.
        boundary = [(0.0, 0.0)] * len(steps)
        if mesh.depth > 1:
            boundary = [_messages(a, stages[a.stage], weight) for (a, *_), weight in zip(steps, scales, strict=True)]
        moments, kept = [], 0.0
        for n, ((action, before, after), weight) in enumerate(zip(steps, scales, strict=True)):
            stage, first = stages[action.stage], action.stage not in gradients
            sizes = (0.0, stage.inputs * weight, stage.activations * weight)
            fuller = max(before, after)
            kept += sizes[fuller] - sizes[before]
            made = None
            if action.stage in by_bucket or (first and action.stage in divided):
                buckets = (1 + IN_FLIGHT) * _bucket(stage) if action.stage in by_bucket else stage.parameters
                made = min(stage.parameters, buckets)
            during = _during(stage, action.kind, after, weight, sizes[fuller], first=first, made=made)
            messages = sum(arriving for arriving, _ in boundary[n + 1 : n + 2])
            messages += sum(leaving for _, leaving in boundary[max(0, n - 1) : n])
            model = parameters, sum(gradients.values()), update.optimizer
            moments.append((*model, round(kept), round(during), round(messages)))
            if action.kind in (*BEGINS_BACKWARD, Kind.BACKWARD_WEIGHT):
                gradients[action.stage] = slice_of(action.stage) if action.stage in by_bucket else stage.parameters
                if updates:
                    moments.append(
                        (parameters, single, update.optimizer, round(kept - sizes[fuller]), update.transient, 0)
                    )
                    del gradients[action.stage]
            kept += sizes[after] - sizes[fuller]
        return _fuller(update, RankBytes(*max(moments, key=sum)))

    return [fullest(rank, actions) for rank, actions in sorted(schedule.items())]


def _during(
    stage: StageBytes, kind: Kind, after: Held, weight: float, kept: float, *, first: bool, made: int | None
) -> float:
    """Return the bytes that an action takes besides ``kept``; ``made``: of gradients where they are divided."""
    if kind is Kind.BACKWARD_WEIGHT:
        return float(stage.parameters * first)
    if kind not in BEGINS_BACKWARD:
        return (stage.forward if after is Held.ACTIVATIONS else stage.forward_only) * weight - kept
    if made is None:
        return (stage.first_backward if first else stage.backward) * weight - kept
    return stage.backward * weight + made - kept


def sharded_bytes(
    stage: StageBytes, peak: int, ranks: int, *, several: bool, slots: int, device: str = "cpu"
) -> RankBytes:
    """Return the bytes of each rank of fsdp, which gathers unit after unit of the parameters.

    Args:
        stage: the whole model and its loss, for the largest microbatch.
        peak: of its passes, with what is gathered (``gathered.gathered_peak``).
        several: a rank computes more than one, and has its part of all gradients from the second on.
    """
    part, kept = -(-stage.parameters // ranks), stage.activations
    passes = RankBytes(part, part if several else 0, slots * part, kept, peak - kept, 0)
    return _fuller(passes, _update(part, part, slots, -(-stage.largest_parameter // ranks), device))


def _update(parameters: int, sliced: int, slots: int, largest: int, device: str) -> RankBytes:
    """While the optimizer updates ``sliced`` of the bytes of ``parameters``: on a GPU torch takes all of them together,
    and a copy of them for what it works out; on a CPU one parameter after the other.

    Args:
        largest: of one parameter, or piece, among those that this rank updates.
    """
    work = sliced if device == "cuda" else UPDATE_COPIES[slots] * largest
    return RankBytes(parameters, sliced, slots * sliced, 0, work, 0)


def _bucket(stage: StageBytes) -> int:
    return max(BUCKET_BYTES, stage.largest_parameter)


def _fuller(*moments: RankBytes) -> RankBytes:
    return max(moments, key=lambda moment: moment.total)


def _messages(action: Action, stage: StageBytes, weight: float) -> tuple[float, float]:
    if action.kind is Kind.FORWARD:
        return stage.received * weight, stage.sent * weight
    if action.kind in BEGINS_BACKWARD:
        return stage.awaited * weight, stage.returned * weight
    return 0.0, 0.0


def host_bytes(schedule: Schedule, stages: Sequence[HostBytes], weights: Sequence[float] | None = None) -> list[int]:
    """Return the bytes on the host of every rank in ``schedule`` at the fullest moment of a step.

    Counted are the buffers of the host's pool, which are up to a ninth larger than what lies in them.

    Args:
        schedule: compute-only, with recomputation where it is done, or lowered.
        stages: of the partition.
        weights: of the microbatches by number, as parts of the largest; 1 each by default.
    """

    def fullest(actions: Sequence[Action]) -> int:
        now = most = 0.0
        for action, before, after in held(actions):
            stage, weight = stages[action.stage], 1.0 if weights is None else weights[action.i]
            sizes, fuller = (0, stage.inputs, stage.kept), max(before, after)
            now += (sizes[fuller] - sizes[before]) * weight
            most = max(most, now + (stage.again * weight if before is Held.ACTIVATIONS else 0.0))
            now += (sizes[after] - sizes[fuller]) * weight
        return round(most)

    return [fullest(actions) for _, actions in sorted(schedule.items())]
