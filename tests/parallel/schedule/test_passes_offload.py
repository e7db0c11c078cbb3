"""Where activations leave for the host and come back: only where there is the time, and as early as they must."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel.schedule.action import PER_PEER, Kind, Schedule
from parallel.schedule.check import check
from parallel.schedule.mesh import Mesh
from parallel.schedule.passes import add_offload, lower
from parallel.schedule.registry import SCHEDULES, build_schedule, mesh_for
from parallel.schedule.simulate import simulate
from parallel.schedule.text import ScheduleError, from_csv, to_csv
from parallel.schedule.timeline import StageCost

TWO_RANKS = Mesh(1, (0, 1))
CHAIN = {(0, 1): True}
NEEDS = (Kind.RECOMPUTE, Kind.BACKWARD, Kind.BACKWARD_INPUT)


def rows(*texts: str) -> Schedule:
    return from_csv("\n".join(texts).replace(" ", ","))


def texts(schedule: Schedule) -> list[str]:
    return [" ".join(map(str, schedule[rank])) for rank in sorted(schedule)]


def costs(copy_s: float) -> list[StageCost]:
    """Two stages of F = 1 and B = 2 seconds, whose activations take so long each way."""
    return [StageCost(1.0, 2.0, 1.0, 1.0, 8, copy_s, copy_s)] * 2


def test_everything_of_a_small_step() -> None:
    schedule = rows("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1")
    assert texts(lower(schedule, TWO_RANKS, CHAIN, offload=True)) == [
        "0F0 0SEND_F0>1 0O0 0P0 0F1 0SEND_F1>1 0O1 0RECV_B0<1 0RECV_B1<1 0P1 0B0 0B1",
        "1RECV_F0<0 1F0 1RECV_F1<0 1B0 1SEND_B0>0 1F1 1B1 1SEND_B1>0",
    ]


def test_copies_that_hide_begin_one_action_ahead() -> None:
    found = texts(add_offload(rows("0F0 0F1 0F2 0F3 0B0 0B1 0B2 0B3"), costs(1.0)))[0]
    assert found == "0F0 0O0 0F1 0O1 0F2 0O2 0P0 0F3 0O3 0P1 0B0 0P2 0B1 0P3 0B2 0B3"


def test_only_where_there_is_time() -> None:
    """Copies of 4 s: 3 beyond F, 2 before B. Between F0 and B0 are 3 s, F1 and B1 4, F2 and B2 5, F3 and B3 6."""
    found = texts(add_offload(rows("0F0 0F1 0F2 0F3 0B0 0B1 0B2 0B3"), costs(4.0)))[0]
    assert found == "0F0 0F1 0F2 0O2 0F3 0O3 0B0 0P2 0B1 0P3 0B2 0B3"


@st.composite
def lowered(draw: st.DrawFn) -> tuple[Schedule, Mesh]:
    name = draw(st.sampled_from(sorted(SCHEDULES)))
    depth = draw(st.integers(2, 4))
    mesh = mesh_for(name, groups=1, depth=depth, chunks=2 if SCHEDULES[name].chunks else 1)
    m = 2 if name == "mast" else draw(st.integers(1, 8))
    links = {(stage, stage + 1): True for stage in range(mesh.stages - 1)}
    copy_s = draw(st.sampled_from([None, 0.0, 0.5, 3.0, 9.0]))
    own = None if copy_s is None else [StageCost(1.0, 2.0, 1.0, 1.0, 8, copy_s, copy_s)] * mesh.stages
    recompute = draw(st.booleans())
    schedule = build_schedule(name, mesh, m)
    found = lower(schedule, mesh, links, recompute=recompute, offload=True, costs=own)
    check(found, mesh, links)
    return found, mesh


@given(lowered())
def test_out_after_forward_and_back_before_what_needs_it(made: tuple[Schedule, Mesh]) -> None:
    schedule, mesh = made
    assert from_csv(to_csv(schedule)) == schedule
    for actions in schedule.values():
        at = {(a.kind, a.stage, a.microbatch, a.replica): n for n, a in enumerate(actions) if a.kind not in PER_PEER}
        out = {key[1:] for key in at if key[0] is Kind.OFFLOAD}
        assert out == {key[1:] for key in at if key[0] is Kind.PREFETCH}
        for place in out:
            needs = [at[key] for kind in NEEDS if (key := (kind, *place)) in at]
            assert at[Kind.FORWARD, *place] < at[Kind.OFFLOAD, *place] < at[Kind.PREFETCH, *place] < min(needs)
    own = [StageCost(1.0, 2.0, 1.0, 1.0, 8)] * mesh.stages
    assert simulate(schedule, mesh, own).makespan_s > 0


def test_copies_take_time_where_nothing_hides_them() -> None:
    alone = Mesh(1, (0,))
    schedule = rows("0F0 0O0 0F1 0P0 0B0 0B1")
    free, slow = ([StageCost(1.0, 2.0, 1.0, 1.0, 8, s, s)] for s in (0.0, 2.5))
    assert simulate(schedule, alone, free).makespan_s == 6
    # Out until 2.5, 1.5 after F0; back from 3.5 on until 6, half a second after B0 would have ended; then B1.
    assert simulate(schedule, alone, slow).makespan_s == 8


@pytest.mark.parametrize("text", ["0O0 0F0 0P0 0B0", "0F0 0P0 0O0 0B0", "0F0 0O0 0B0 0P0"])
def test_wrong_order_is_found(text: str) -> None:
    with pytest.raises(ScheduleError, match="stands before"):
        check(rows(text), Mesh(1, (0,)), {})
