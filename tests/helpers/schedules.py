"""Schedules as text, and any schedule of the registry on a small mesh with any skips."""

from __future__ import annotations

from hypothesis import strategies as st

from parallel.schedule.action import Schedule
from parallel.schedule.dependencies import Links
from parallel.schedule.mesh import Mesh
from parallel.schedule.registry import SCHEDULES, build_schedule, mesh_for
from parallel.schedule.text import from_csv

TWO_RANKS = Mesh(1, (0, 1))
PAIR = Mesh(1, (0, 1), replicas=2)


def rows(*texts: str) -> Schedule:
    """Return the schedule of one text a rank, with blanks between actions."""
    return from_csv("\n".join(texts).replace(" ", ","))


def texts(schedule: Schedule) -> list[str]:
    return [" ".join(map(str, schedule[rank])) for rank in sorted(schedule)]


def chain(mesh: Mesh) -> dict[tuple[int, int], bool]:
    return {(stage, stage + 1): True for stage in range(mesh.stages - 1)}


def small_mesh(name: str, groups: int = 1, depth: int = 2) -> Mesh:
    """Return a mesh of ``name``, with two chunks a rank where it takes several."""
    return mesh_for(name, groups=groups, depth=depth, chunks=2 if SCHEDULES[name].chunks else 1)


@st.composite
def meshes(draw: st.DrawFn) -> tuple[Schedule, Mesh, Links]:
    """Any schedule, the chain of stages and any skips, some of which no gradient flows back through."""
    name = draw(st.sampled_from(sorted(SCHEDULES)))
    groups, depth = draw(st.integers(1, 3)), draw(st.integers(SCHEDULES[name].replicas, 6))
    chunks = draw(st.integers(2, 3)) if SCHEDULES[name].chunks else 1
    mesh = mesh_for(name, groups=groups, depth=depth, chunks=chunks)
    m = 2 * groups if name == "mast" else draw(st.integers(groups, 12))
    far = [(s, t) for s in range(mesh.stages) for t in range(s + 2, mesh.stages)]
    skips = draw(st.lists(st.sampled_from(far), max_size=4, unique=True)) if far else []
    return build_schedule(name, mesh, m), mesh, chain(mesh) | {pair: draw(st.booleans()) for pair in skips}
