"""Bytes that each rank takes at most in a training step, for any schedule, before it is run.

Takes a partition of a graph that was traced with its loss, the schedule and the optimizer; gives ``RankBytes``. The
actions of a rank are gone through one by one: what microbatches in flight keep, what lives only while an action runs
(``stage_bytes``), and the messages beside it, which are received one action ahead and leave during the next. Buffers of
modules, a few numbers per channel, are not counted. No torch here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from parallel.graph.layers import LayerGraph
from parallel.graph.partition import Partition
from parallel.memory.kept_bytes import kept_bytes
from parallel.memory.policy import ActivationPolicy
from parallel.memory.stage_bytes import StageBytes, stage_bytes
from parallel.schedule.action import BEGINS_BACKWARD, COMPUTE, Action, Kind, Schedule
from parallel.schedule.microbatch import share_of
from parallel.schedule.placement import Placement

GATHERED = 2
"""Units of FSDP that are whole at a time: the one at work, and the one gathered ahead."""
UNIT = 8
"""A unit holds at most this part of the parameters (``sharding_units.LARGEST``), where blocks allow that."""
UPDATE_COPIES = (0, 1, 2, 2)
"""By values that the optimizer keeps for each parameter: copies of one parameter that torch's update on a CPU makes on
its way (``torch/optim``). SGD's decayed gradient; AdamW's root of the second moment and, beside it, the quotient. A
running average is added in place; SGD with one is counted as AdamW."""


@dataclass(frozen=True)
class RankBytes:
    """What one rank takes at the fullest moment of a step.

    Attributes:
        activations: kept for backward passes to come, that under way included.
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


def in_flight(schedule: Schedule, placement: Placement) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Return, by rank of the first group, the combinations of numbers of microbatches in flight that it comes to.

    Returns:
        Of each rank those that no other one exceeds; a number for each stage the rank holds, in ascending order.
    """
    combinations = []
    for rank in range(placement.depth):
        stages = sorted({stage for stage, _ in placement.held_by(rank)})
        now: Counter[int] = Counter()
        reached: dict[tuple[int, ...], None] = {}
        last = _last(schedule[rank])
        for action in schedule[rank]:
            if action.kind is Kind.FORWARD:
                now[action.stage] += 1
                reached[tuple(now[stage] for stage in stages)] = None
            elif action.kind is last:
                now[action.stage] -= 1
        combinations.append(tuple(n for n in reached if not any(_exceeds(other, n) for other in reached)))
    return tuple(combinations)


def _last(actions: Sequence[Action]) -> Kind:
    """The kind of action after which nothing is held of a microbatch any more."""
    return Kind.BACKWARD_WEIGHT if any(a.kind is Kind.BACKWARD_WEIGHT for a in actions) else Kind.BACKWARD


def _exceeds(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    return one != other and all(a >= b for a, b in zip(one, other, strict=True))


def rank_bytes(
    partition: Partition,
    placement: Placement,
    schedule: Schedule,
    *,
    slots: int,
    shard_optimizer: bool = False,
    weights: Sequence[float] | None = None,
    device: str = "cpu",
    stages: Sequence[StageBytes] | Mapping[int, StageBytes] | None = None,
    summed: bool = False,
) -> list[RankBytes]:
    """Return the bytes of every rank in ``schedule``.

    Args:
        partition: of the graph of the largest microbatch and its loss.
        schedule: compute-only, with recomputation where it is done, or lowered.
        slots: values that the optimizer keeps for each parameter: 1 for momentum, 2 for Adam.
        shard_optimizer: of a pair of replicas' ranks, each keeps the optimizer state of the stage that it holds of the
            first replica.
        weights: of the microbatches by number, as parts of the largest; 1 each by default.
        device: kind of device, "cpu" or "cuda", which the optimizer's own memory depends on.
        stages: what ``stage_bytes`` gives for the partition, where it is known, or ``kept_bytes`` under another rule;
            those that the ranks of ``schedule`` hold are enough.
        summed: gradients of every stage are summed over ranks, those that ``placement`` does not tell of among them.
    """
    stages = stage_bytes(partition) if stages is None else stages
    return [
        _Walk(rank, actions, placement, stages, slots, shard_optimizer, weights, device, summed).fullest()
        for rank, actions in sorted(schedule.items())
    ]


def whole_bytes(
    name: str,
    ranks: int,
    m: int,
    graph: LayerGraph,
    slots: int,
    device: str = "cpu",
    policy: ActivationPolicy | None = None,
    stage: StageBytes | None = None,
) -> RankBytes:
    """Return the bytes of each rank where every rank computes the whole model: single, ddp and fsdp.

    DistributedDataParallel holds all gradients in buckets from the beginning, and those of microbatches before the last
    outside of them. Sharded, a rank gathers unit after unit, and holds gradients whole until the last microbatch.

    Args:
        name: of the strategy: "single", "ddp" or "fsdp".
        ranks: that share the global batch.
        m: microbatches of the global batch.
        graph: of the model and its loss, traced with the largest microbatch.
        slots: values that the optimizer keeps for each parameter.
        policy: what becomes of activations; all stay on the device by default.
        stage: what ``kept_bytes`` gives for the whole model, where it is known.
    """
    if stage is None:
        (stage,) = kept_bytes(Partition(graph, (0,)), policy or ActivationPolicy())
    several = len(share_of(0, ranks, m)) > 1
    parameters, kept = stage.parameters, stage.activations
    # Buckets take in the gradients layer by layer; without them all that are made add up.
    in_one_go = (stage.backward if name == "ddp" else stage.first_backward) - kept
    added = stage.backward - kept + parameters
    if name == "fsdp":
        part = -(-parameters // ranks)
        gathered = min(parameters, GATHERED * parameters // UNIT)
        work = max(stage.forward, stage.backward) - kept + gathered
        gradients = parameters if several else part
        update = _update(part, slots * part, -(-stage.largest_parameter // ranks), slots, device)
        return _fuller(RankBytes(part, gradients, slots * part, kept, work, 0), update)
    beside = parameters if name == "ddp" else 0  # buckets
    extra = max(in_one_go, added if several else 0, stage.forward - kept + (parameters if several else 0))
    gradients = parameters if name == "ddp" or several else 0
    return _fuller(
        RankBytes(parameters, gradients, slots * parameters, kept, extra + beside - gradients, 0),
        _update(parameters, slots * parameters, stage.largest_parameter, slots, device),
    )


def _update(parameters: int, optimizer: int, largest: int, slots: int, device: str) -> RankBytes:
    """While the optimizer updates: on a GPU torch takes all parameters at once, and a copy of them for what it works
    out; on a CPU one after the other.

    Args:
        largest: of one parameter among those that this rank updates.
    """
    work = parameters if device == "cuda" else UPDATE_COPIES[slots] * largest
    return RankBytes(parameters, parameters, optimizer, 0, work, 0)


def _fuller(*moments: RankBytes) -> RankBytes:
    return max(moments, key=lambda moment: moment.total)


class _Walk:
    """One rank through its actions."""

    def __init__(
        self,
        rank: int,
        actions: Sequence[Action],
        placement: Placement,
        stages: Sequence[StageBytes] | Mapping[int, StageBytes],
        slots: int,
        shard_optimizer: bool,
        weights: Sequence[float] | None,
        device: str,
        summed: bool,
    ) -> None:
        self._actions = [action for action in actions if action.kind in COMPUTE]
        self._stages, self._weights = stages, weights
        held = sorted({stage for stage, _ in placement.held_by(rank)})
        self._parameters = sum(stages[stage].parameters for stage in held)
        shared = {stage for stage in held if summed or len(placement.holders(stage)) > 1}
        owned = [s for s in held if not shard_optimizer or placement.rank_of(s, 0, placement.group_of(rank)) == rank]
        optimizer = slots * sum(stages[stage].parameters for stage in owned)
        largest = max((stages[stage].largest_parameter for stage in owned), default=0)
        self._update = _update(self._parameters, optimizer, largest, slots, device)
        # Gradients that are summed over ranks lie in buckets from the beginning; others are made by the first backward.
        self._gradients = {stage: stages[stage].parameters for stage in shared}
        self._recomputed = {a.key for a in self._actions if a.kind is Kind.RECOMPUTE}
        self._split = any(action.kind is Kind.BACKWARD_WEIGHT for action in self._actions)
        self._alone = placement.depth == 1

    def fullest(self) -> RankBytes:
        return _fuller(self._update, RankBytes(*max(self._moments(), key=sum)))

    def _moments(self) -> Iterator[tuple[int, int, int, int, int, int]]:
        """What ``RankBytes`` has, while each action runs."""
        kept = 0.0
        for n, action in enumerate(self._actions):
            stage, weight = self._stages[action.stage], self._weight(action)
            before, during, kept = self._step(action, stage, weight, kept)
            boundary = sum(self._arriving(a) for a in self._actions[n + 1 : n + 2])
            boundary += sum(self._leaving(a) for a in self._actions[max(0, n - 1) : n])
            yield (
                self._parameters,
                sum(self._gradients.values()),
                self._update.optimizer,
                round(before),
                round(during),
                0 if self._alone else round(boundary),
            )
            if action.kind in (*BEGINS_BACKWARD, Kind.BACKWARD_WEIGHT):
                self._gradients[action.stage] = stage.parameters

    def _step(self, action: Action, stage: StageBytes, weight: float, kept: float) -> tuple[float, float, float]:
        """What is kept for backward while ``action`` runs, what lives besides, and what is kept after it."""
        own, entered = stage.activations * weight, stage.inputs * weight
        match action.kind:
            case Kind.FORWARD if action.key in self._recomputed:
                return kept + entered, stage.forward_only * weight - entered, kept + entered
            case Kind.FORWARD:
                return kept + own, stage.forward * weight - own, kept + own
            case Kind.RECOMPUTE:
                return kept - entered + own, stage.forward * weight - own, kept - entered + own
            case Kind.BACKWARD_WEIGHT:
                return kept, self._parameter_gradients(action, stage), kept - own
        first = action.stage not in self._gradients
        during = ((stage.first_backward if first else stage.backward) - stage.activations) * weight
        return kept, during, kept if self._split else kept - own

    def _parameter_gradients(self, action: Action, stage: StageBytes) -> float:
        return 0.0 if action.stage in self._gradients else float(stage.parameters)

    def _arriving(self, action: Action) -> float:
        """Messages that ``action`` waits for."""
        stage = self._stages[action.stage]
        if action.kind is Kind.FORWARD:
            return stage.received * self._weight(action)
        return stage.awaited * self._weight(action) if action.kind in BEGINS_BACKWARD else 0.0

    def _leaving(self, action: Action) -> float:
        """Messages that ``action`` has made."""
        stage = self._stages[action.stage]
        if action.kind is Kind.FORWARD:
            return stage.sent * self._weight(action)
        return stage.returned * self._weight(action) if action.kind in BEGINS_BACKWARD else 0.0

    def _weight(self, action: Action) -> float:
        return 1.0 if self._weights is None else self._weights[action.i]
