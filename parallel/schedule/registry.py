"""Every schedule under its name, and the schedule of a whole mesh of ranks.

Schedules are compute-only, of every rank of every data-parallel group, with microbatch numbers of the global batch.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from dataclasses import dataclass

from parallel.schedule.action import Schedule
from parallel.schedule.generators import (
    bidirectional,
    gpipe,
    interleaved,
    master,
    mp_basic,
    one_f_one_b,
    pipedream,
    zero_bubble,
)
from parallel.schedule.mesh import Mesh
from parallel.schedule.shares import Shares, share_of


@dataclass(frozen=True, slots=True)
class ScheduleKind:
    """A family of schedules.

    Attributes:
        build: (depth, microbatches) -> Schedule of one group; with ``chunks`` a third argument, the chunks a rank.
        replicas: copies of the model in a group; with 2 the second is inverted.
        microbatches: of one group when the user names none; None: 2D, which leaves gpipe and 1f1b a bubble of a third.
        fixed: a group computes that many microbatches and no other number.
    """

    name: str
    build: Callable[..., Schedule]
    replicas: int = 1
    chunks: bool = False
    microbatches: int | None = None
    fixed: bool = False


_KINDS = (
    ScheduleKind("mp-basic", mp_basic, microbatches=1),
    ScheduleKind("gpipe", gpipe),
    ScheduleKind("1f1b", one_f_one_b),
    ScheduleKind("interleaved", interleaved, chunks=True),
    ScheduleKind("zero-bubble", zero_bubble),
    ScheduleKind("mast", master, replicas=2, microbatches=2, fixed=True),
    ScheduleKind("master", master, replicas=2),
    ScheduleKind("bidirectional", bidirectional, replicas=2),
)
SCHEDULES: dict[str, ScheduleKind] = {kind.name: kind for kind in _KINDS}

PIPEDREAM = ScheduleKind("pipedream", pipedream)
"""Every microbatch updates the weights (PipeDream, Harlap et al., 2018): not the plain step, so only run by name."""

SPATIAL = ScheduleKind("spatial", mp_basic, microbatches=1)
"""Each tile is divided among the ranks of a team (Dryden et al., IPDPS 2019): one stage, with nothing to pipeline."""

SUBGRAPH = ScheduleKind("subgraph", mp_basic, microbatches=1)
"""The ranks of a team compute the branches of each block side by side (Jain et al., SUPER, IPDPS 2021): one stage."""

ONE_STAGE = {name: ScheduleKind(name, mp_basic) for name in ("single", "ddp", "fsdp", "async")} | {
    SPATIAL.name: SPATIAL,
    SUBGRAPH.name: SUBGRAPH,
}
"""Strategies that do not cut the model into stages."""


def default_microbatches(name: str, depth: int) -> int:
    """Return the microbatches of one group when the user names none, for the schedule ``name``."""
    return kind_of(name).microbatches or 2 * depth


def mesh_for(name: str, *, groups: int, depth: int, chunks: int = 1, members: int = 1) -> Mesh:
    """Return the mesh that schedule ``name`` runs on.

    Args:
        depth: ranks of a group.
        chunks: stages a rank holds of each replica; only interleaved takes more than 1, and it takes at least 2.
        members: ranks of a team.

    Raises:
        ValueError: no schedule has this name, or it cannot run on such a mesh.
    """
    mesh = Mesh(groups, tuple(range(depth)) * chunks, kind_of(name).replicas, members)
    _raise_all(_mesh_faults(name, mesh))
    return mesh


def build_schedule(name: str, mesh: Mesh, m: int, shares: Shares = ()) -> Schedule:
    """Return the schedule of all groups: group g computes its share of the microbatches.

    Args:
        m: microbatches of the global batch.
        shares: of the groups; empty: consecutive ones, the same number for each.

    Raises:
        ValueError: no schedule has this name, or it cannot run on this mesh or with ``m``.
    """
    kind, groups = kind_of(name), mesh.groups
    assert kind.replicas == mesh.replicas, (name, mesh)
    faults = _mesh_faults(name, mesh)
    if m < groups:
        faults.append(
            f"{m} microbatches cannot keep {groups} data-parallel groups busy: raise --microbatches to {groups} or more"
        )
    elif kind.fixed and m != (usual := groups * (kind.microbatches or 0)):
        faults.append(
            f"{name} computes {kind.microbatches} microbatches a group, {usual} in {groups} groups, not {m}: set "
            f"--microbatches {usual}, or use master, which takes any number"
        )
    if shares and (len(shares) != groups or sorted(itertools.chain(*shares)) != list(range(m))):
        faults.append(f"shares {shares} do not give {m} microbatches to {groups} data-parallel groups, each to one")
    elif shares and kind.fixed and {len(share) for share in shares} != {kind.microbatches}:
        faults.append(f"{name} computes {kind.microbatches} microbatches a group: use master for other shares")
    _raise_all(faults)
    schedule: Schedule = {}
    for g in range(groups):
        share = shares[g] if shares else share_of(g, groups, m)
        extra = (mesh.stages // mesh.depth,) if kind.chunks else ()
        for k, actions in kind.build(mesh.depth, len(share), *extra).items():
            schedule[g * mesh.depth + k] = [
                action if share[action.i] == action.i else dataclasses.replace(action, microbatch=share[action.i])
                for action in actions
            ]
    return schedule


def kind_of(name: str) -> ScheduleKind:
    """Return the family of a schedule.

    Raises:
        ValueError: no schedule has this name.
    """
    if name in ONE_STAGE:
        return ONE_STAGE[name]
    named = SCHEDULES | {PIPEDREAM.name: PIPEDREAM}
    if name not in named:
        raise ValueError(f"there is no schedule {name!r}; the schedules are {', '.join(named)}")
    return named[name]


def _mesh_faults(name: str, mesh: Mesh) -> list[str]:
    kind, depth, chunks = kind_of(name), mesh.depth, mesh.stages // max(1, mesh.depth)
    faults = []
    if mesh.groups < 1 or depth < 1:
        faults.append(f"a mesh has at least one group of at least one rank, not {mesh.groups} x {depth}")
    if name == SPATIAL.name and depth != 1:
        faults.append(f"spatial has one stage, not {depth}: use --grid with 1f1b or another schedule for several")
    if name == SUBGRAPH.name and depth != 1:
        faults.append(f"subgraph has one stage, not {depth}: its ranks are ways, not stages")
    if kind.replicas > 1 and depth < 2:
        faults.append(f"{name} inverts its second replica, which takes at least 2 ranks a group, not {depth}")
    if kind.chunks and chunks < 2:
        faults.append(
            f"{name} needs 2 or more stages a rank, not {chunks}: ask for {2 * depth} stages on {depth} ranks, "
            "or use 1f1b"
        )
    if not kind.chunks and chunks != 1:
        faults.append(f"{name} has one stage a rank, not {chunks}: ask for {depth} stages, or use interleaved")
    return faults


def _raise_all(faults: list[str]) -> None:
    if faults:
        raise ValueError("; ".join(faults))
