"""What the parts of a step cost, and what follows from a rank's list of actions without running it.

Of stages and links, for one microbatch; ``simulate`` puts them together. No torch here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from parallel.schedule.action import Action, Kind


@dataclass(frozen=True, slots=True)
class StageCost:
    """What a stage costs for one microbatch of weight 1.

    Attributes:
        backward_s: of a whole backward pass; the next two are of its halves.
        activation_bytes: kept from a forward pass for its backward pass.
        out_s, back_s: to copy those to the host and back, where they go there.
    """

    forward_s: float
    backward_s: float
    backward_input_s: float
    backward_weight_s: float
    activation_bytes: int
    out_s: float = 0.0
    back_s: float = 0.0


@dataclass(frozen=True, slots=True)
class LinkCost:
    """What passing the values of one microbatch of weight 1 on costs; nothing between stages on one rank.

    Attributes:
        backward_s: of the gradients; None where none flow back.
    """

    forward_s: float
    backward_s: float | None


def seconds_by_kind(cost: StageCost) -> dict[Kind, float]:
    """Return what each kind of compute action takes."""
    return {
        Kind.FORWARD: cost.forward_s,
        Kind.RECOMPUTE: cost.forward_s,
        Kind.BACKWARD: cost.backward_s,
        Kind.BACKWARD_INPUT: cost.backward_input_s,
        Kind.BACKWARD_WEIGHT: cost.backward_weight_s,
    }


def peak_bytes(actions: Sequence[Action], costs: Sequence[StageCost], weight: Mapping[int, float]) -> int:
    """Return the most bytes of activations that a rank keeps at any time."""
    ends = (Kind.RECOMPUTE, Kind.BACKWARD_WEIGHT)
    keys = {kind: {a.key for a in actions if a.kind is kind} for kind in ends}
    now = peak = 0.0
    for action in actions:
        recomputed, split = (action.key in keys[kind] for kind in ends)
        if action.kind is (Kind.RECOMPUTE if recomputed else Kind.FORWARD):
            now += costs[action.stage].activation_bytes * weight[action.i]
            peak = max(peak, now)
        elif action.kind is (Kind.BACKWARD_WEIGHT if split else Kind.BACKWARD):
            now -= costs[action.stage].activation_bytes * weight[action.i]
    return round(peak)
