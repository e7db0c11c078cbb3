"""Refuse strategies under which state that forward passes update would not be the plain step's."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from torch import nn

from parallel.comm.communicator import Communicator
from parallel.graph.partition import Partition
from parallel.memory.policy import ActivationPolicy
from parallel.schedule.action import Action, Kind
from parallel.schedule.mesh import Mesh
from parallel.trace.updated_search import ATTRIBUTE, TRAINED, Updated, refuse_checkpointed, updated_buffers
from parallel.trace.without_data import exclusively, preserve_module_state

if TYPE_CHECKING:
    from parallel.trace.trace import Traced

EXACT = "single, or mp-basic, gpipe, 1f1b or interleaved with --stages as many as --ranks, without --recompute"
"""Strategies in which one copy of each stage sees all microbatches once and in order."""

ALONE = "single without --recompute and --stream"
"""The strategy in which the model's own forward runs, once for each microbatch."""


def refuse_updating_copies(
    module: nn.Module, shape: tuple[int, ...], communicator: Communicator, strategy: str
) -> None:
    """Refuse a model, which need not be one that can be traced, that each rank would hold a copy of while its forward
    passes update state; every rank calls it.

    Raises:
        ValueError: names the first state, and says what to do; so do the other functions here.
    """
    if communicator.world == 1:
        return
    with exclusively(communicator), preserve_module_state(module):
        module.train()
        dtype = next(module.parameters()).dtype.to_real()
        refuse_checkpointed(module, shape, dtype)
        _refuse_copies(updated_buffers(module, shape, dtype), communicator.world, strategy)


def _refuse_copies(updated: Mapping[str, Updated], copies: int, strategy: str) -> None:
    if updated and copies > 1:
        raise ValueError(_fault(updated, strategy, f"{copies} copies would each do so for some of the microbatches"))


def copies_fault(updated: Mapping[str, Updated]) -> str:
    """Return why the model can neither be copied nor recomputed, for a planner; empty where it can."""
    return f"{_named(updated)}, copies for some of the microbatches and recomputation twice" if updated else ""


def refuse_schedule(
    traced: Traced,
    partition: Partition,
    schedule: Mapping[int, Collection[Action]],
    mesh: Mesh,
    policy: ActivationPolicy,
    strategy: str,
) -> None:
    """Refuse a schedule under which a stage with such state has several copies, is recomputed, or sees microbatches in
    another order than the plain step. Every rank finds the same."""
    for stage, updated in _by_stage(traced, partition).items():
        holders = mesh.teams_with(stage)
        _refuse_copies(updated, len(holders), strategy)
        actions = (a for a in schedule[holders[0]] if a.kind is Kind.FORWARD and a.stage == stage)
        seen = [action.microbatch for action in actions if action.microbatch is not None]
        if policy.segmented or policy.stagewise:
            reason = f"--recompute {policy.recompute} would do so in backward passes, too"
        elif weights := {name: state for name, state in updated.items() if state.kind == TRAINED}:
            updated, reason = weights, "several microbatches may be in flight"
        elif seen != sorted(seen):
            reason = f"stage {stage} would see the microbatches in the order {seen}"
        else:
            continue
        raise ValueError(_fault(updated, strategy, reason))


def _by_stage(traced: Traced, partition: Partition) -> dict[int, dict[str, Updated]]:
    """Return the buffers of each stage that has some; refuse one that no layer uses: nothing would update it."""
    by_stage: dict[int, dict[str, Updated]] = {}
    targets = {
        str(node.target): partition.stage_of(node.name)
        for node in traced.training.graph.nodes
        if node.op in ("call_module", "get_attr")
    }
    for name, buffer in traced.updated.items():
        stages = {stage for path, stage in targets.items() if f"{name}.".startswith(f"{path}.")}
        if not stages:
            raise ValueError(
                f"{name} of {buffer.owner}: a buffer that each forward pass of training updates, in a way that a graph "
                "of layers does not record: call its module, or update it in place, as copy_(...) does"
            )
        for stage in stages:
            by_stage.setdefault(stage, {})[name] = buffer
    return by_stage


def _fault(updated: Mapping[str, Updated], strategy: str, what: str) -> str:
    use = ALONE if any(state.kind in (ATTRIBUTE, TRAINED) for state in updated.values()) else EXACT
    return (
        f"{_named(updated)}; under --parallel {strategy} {what}, and it would not be what one process has: use "
        f"--parallel {use}, or leave the update out of forward"
    )


def refuse_attributes(updated: Mapping[str, Updated]) -> None:
    """Refuse a model that keeps state in plain attributes: it cannot be taken apart into layers."""
    if attributes := {name: state for name, state in updated.items() if state.kind == ATTRIBUTE}:
        raise ValueError(
            f"{_named(attributes)}, which a graph of layers does not record: use --parallel {ALONE}, or make it a "
            "buffer (register_buffer) that forward updates in place, as copy_(...) and add_(...) do"
        )


def _named(updated: Mapping[str, Updated]) -> str:
    name, buffer = next(iter(updated.items()))
    article = "an" if buffer.kind == ATTRIBUTE else "a"
    more = f" (and {len(updated) - 1} more)" if len(updated) > 1 else ""
    return f"{name} of {buffer.owner}{more} is {article} {buffer.kind} that each forward pass of training updates"
