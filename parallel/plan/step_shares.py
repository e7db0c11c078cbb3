"""Shares of a step's time by what it is spent on: computing, recomputation, halos, waiting, messages, sums, update.

Takes the row of a plan; gives the shares in the mean over the ranks of a group. Messages are the time that a step
would be shorter by if they took none (``Evaluator.step_time``), waiting is the rest of the bubble. No torch here.
"""

from __future__ import annotations

import dataclasses

from parallel.memory.policy import KEEP_ALL, ActivationPolicy
from parallel.plan.evaluate import Evaluator
from parallel.plan.plan import PlanRow
from parallel.schedule.action import Kind
from parallel.strategy import Strategy

COMPUTING = "computing"
"""What a step would be if nothing were lost."""


def step_shares(evaluator: Evaluator, row: PlanRow) -> dict[str, float]:
    """Return what a step is spent on -> its share of the step, of a row that can run; they add up to 1.

    Shares of 0 are left out.
    """
    strategy, partition = row.strategy, evaluator.partition_of(row)
    step = evaluator.step_time(strategy, partition)
    passes_s = step.step_s - step.exchange_s - step.update_s
    waiting_s = step.bubble * passes_s
    messages_s = 0.0
    if strategy.stages > 1:
        without = evaluator.step_time(strategy, partition, messages=False)
        messages_s = min(waiting_s, max(0.0, step.step_s - without.step_s))

    def stage_s(candidate: Strategy) -> float:
        return sum(cost.forward_s + cost.backward_s for cost in evaluator.stages.stage_costs(candidate, partition))

    whole_s, plain_s = stage_s(strategy), stage_s(dataclasses.replace(strategy, policy=KEEP_ALL))
    alone_s = plain_s
    if strategy.members > 1:  # each would take its part of the time that one rank takes for the tile
        _, costs = evaluator.stages.microbatch(evaluator.stages.tiles(strategy))
        alone_s = min(plain_s, sum(costs.seconds) / strategy.members)
    busy = [span for rank in step.timeline.spans for span in step.timeline.compute(rank)]
    again_s = sum(span.duration_s for span in busy if span.action.kind is Kind.RECOMPUTE)
    again_s *= (passes_s - waiting_s) / sum(span.duration_s for span in busy)
    per_s = (passes_s - waiting_s - again_s) / whole_s
    seconds = {
        COMPUTING: alone_s * per_s,
        "halos and uneven parts" if strategy.grid else "uneven branches": (plain_s - alone_s) * per_s,
        _saving(strategy.policy): (whole_s - plain_s) * per_s + again_s,
        "waiting for other stages": waiting_s - messages_s,
        "messages": messages_s,
        "gathering parameters" if strategy.name == "fsdp" else "sums of gradients": step.exchange_s,
        "update": step.update_s,
    }
    return {what: spent_s / step.step_s for what, spent_s in seconds.items() if spent_s > 0}


def _saving(policy: ActivationPolicy) -> str:
    """Return what saves memory and takes time."""
    if policy.stream is not None:
        return "recomputation, copies of boxes"
    again, moves = policy.recompute != "none", "copies to the host"
    return "recomputation, copies" if again and policy.moves else moves if policy.moves else "recomputation"
