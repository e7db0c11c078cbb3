"""What ``check`` proves of the messages and sums of a lowered schedule, and what it says of wrong ones."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel.schedule.action import COMPUTE, Kind
from parallel.schedule.check import check
from parallel.schedule.mesh import Mesh
from parallel.schedule.passes import lower
from parallel.schedule.registry import SCHEDULES, build_schedule, mesh_for
from parallel.schedule.text import ScheduleError, from_csv
from tests.helpers.schedules import TWO_RANKS, small_mesh

CHAIN = {(0, 1): True}
FIRST = "0F0 0SEND_F0>1 0F1 0SEND_F1>1 0RECV_B0<1 0B0 0RECV_B1<1 0B1"
SECOND = "1RECV_F0<0 1F0 1B0 1SEND_B0>0 1RECV_F1<0 1F1 1B1 1SEND_B1>0"


def faults(*rows: str, mesh: Mesh = TWO_RANKS, links: dict[tuple[int, int], bool] | None = None) -> list[str]:
    with pytest.raises(ScheduleError) as error:
        check(from_csv("\n".join(rows).replace(" ", ",")), mesh, CHAIN if links is None else links)
    return [str(fault) for fault in error.value.faults]


def test_right_messages() -> None:
    check(from_csv(f"{FIRST}\n{SECOND}".replace(" ", ",")), TWO_RANKS, CHAIN)


WITHOUT_RECEIVE = SECOND.replace("1RECV_F1<0 ", "")
NEEDED = "stands before the computation that makes what it sends"
FAULTS = [
    (FIRST, WITHOUT_RECEIVE, "rank 0, position 3, 0SEND_F1>1: 1RECV_F1<0 is missing on rank 1"),
    (FIRST, SECOND.replace(" 1SEND_B0>0", ""), "rank 0, position 4, 0RECV_B0<1: 1SEND_B0>0 is missing on rank 1"),
    (
        FIRST.replace("0SEND_F1>1 ", ""),
        WITHOUT_RECEIVE,
        "rank 1, position 4, 1F1: 1RECV_F1<0 is missing, and its send on rank 0",
    ),
    (
        FIRST.replace("0SEND_F1>1", "0SEND_F1>1 0SEND_F1>1"),
        SECOND,
        "rank 0, position 4, 0SEND_F1>1: stands on rank 0, position 3 already",
    ),
    (FIRST.replace("0F1 0SEND_F1>1", "0SEND_F1>1 0F1"), SECOND, f"rank 0, position 2, 0SEND_F1>1: {NEEDED}"),
    (FIRST, SECOND.replace("1B0 1SEND_B0>0", "1SEND_B0>0 1B0"), f"rank 1, position 2, 1SEND_B0>0: {NEEDED}"),
    (FIRST, SECOND.replace("1B0 1SEND_B0>0", "1SEND_B0>0 1I0 1W0"), f"rank 1, position 2, 1SEND_B0>0: {NEEDED}"),
    (
        FIRST,
        SECOND.replace("1RECV_F1<0 1F1", "1F1 1RECV_F1<0"),
        "rank 1, position 4, 1F1: stands before 1RECV_F1<0, which it needs",
    ),
    # With tags both would arrive; a channel without tags hands microbatch 0 to the receive of microbatch 1.
    (
        FIRST,
        "1RECV_F1<0 1RECV_F0<0 1F0 1B0 1SEND_B0>0 1F1 1B1 1SEND_B1>0",
        "rank 1, position 0, 1RECV_F1<0: rank 0 sends 0SEND_F0>1 before that",
    ),
    # A value comes with its message, not with its computation.
    (
        "0F0 0F1 0RECV_B0<1 0RECV_B1<1 0B0 0B1 0SEND_F0>1 0SEND_F1>1",
        SECOND,
        "rank 1, position 1, 1F0: waits for ever for 0SEND_F0>1",
        "rank 0, position 4, 0B0: waits for ever for 1SEND_B0>0",
    ),
]


@pytest.mark.parametrize("texts", FAULTS)
def test_faults(texts: tuple[str, ...]) -> None:
    first, second, *expected = texts
    assert faults(first, second) == expected


def test_message_where_nothing_passes() -> None:
    first, second = "0F0 0SEND_F0>1 0B0", "1RECV_F0<0 1F0 1B0 1SEND_B0>0"
    assert faults(first, second, links={}) == [
        "rank 1, position 0, 1RECV_F0<0: nothing passes from stage 0 to stage 1",
        "rank 0, position 1, 0SEND_F0>1: nothing passes from stage 0 to stage 1",
        "rank 1, position 3, 1SEND_B0>0: nothing passes from stage 0 to stage 1",
    ]
    assert faults(first, second, links={(0, 1): False}) == [
        "rank 1, position 3, 1SEND_B0>0: no gradient flows from stage 1 back to stage 0"
    ]


def test_message_to_a_stage_of_the_same_rank() -> None:
    found = faults("0F0 0SEND_F0>1 1RECV_F0<0 1F0 1B0 0B0", mesh=Mesh(1, (0, 0)))
    assert found == [
        "rank 0, position 1, 0SEND_F0>1: stage 1 is on this rank too: nothing to send",
        "rank 0, position 2, 1RECV_F0<0: stage 0 is on this rank too: nothing to send",
    ]


def test_replicas_share_the_channel_between_two_ranks() -> None:
    mesh = Mesh(1, (0, 1), replicas=2)
    first = "0F0 0SEND_F0>1 1:1RECV_F1<0 1:1F1 1:1B1 1:1SEND_B1>0 0RECV_B0<1 0B0 0REDUCE 1:1REDUCE"
    right = "1:0F1 1:0SEND_F1>1 1RECV_F0<0 1F0 1B0 1SEND_B0>0 1:0RECV_B1<1 1:0B1 1:0REDUCE 1REDUCE"
    wrong = "1:0F1 1:0SEND_F1>1 1:0RECV_B1<1 1RECV_F0<0 1F0 1B0 1SEND_B0>0 1:0B1 1:0REDUCE 1REDUCE"
    check(from_csv(f"{first}\n{right}".replace(" ", ",")), mesh, CHAIN)
    assert faults(first, wrong, mesh=mesh) == ["rank 1, position 2, 1:0RECV_B1<1: rank 0 sends 0SEND_F0>1 before that"]


def test_sum_missing_early_or_repeated() -> None:
    two_groups = Mesh(2, (0,))
    right = "0F0 0B0 0REDUCE"
    check(from_csv(f"{right}\n0F1 0B1 0REDUCE".replace(" ", ",")), two_groups, {})
    for second, fault in {
        "0F1 0B1": ", 0REDUCE: is missing: other ranks hold copies of the stage",
        "0F1 0REDUCE 0B1": ", position 1, 0REDUCE: stands before the last backward pass, 0B1",
        "0F1 0I1 0REDUCE 0W1": ", position 2, 0REDUCE: stands before the last backward pass, 0W1",
        "0F1 0B1 0REDUCE 0REDUCE": ", position 3, 0REDUCE: rank 0 sums the stage's gradients 1x, this rank 2x",
    }.items():
        assert faults(right, second, mesh=two_groups, links={}) == [f"rank 1{fault}"]


def test_sums_in_different_orders() -> None:
    found = faults("0F0 1F0 1B0 0B0 1REDUCE 0REDUCE", "0F1 1F1 1B1 0B1 0REDUCE 1REDUCE", mesh=Mesh(2, (0, 0)))
    assert found == ["rank 1, position 4, 0REDUCE: rank 0 sums stages [1, 0] in this order, this rank [0, 1]"]


@given(data=st.data())
def test_any_lowered_schedule_with_a_message_or_sum_taken_out_is_refused(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(SCHEDULES)))
    mesh = small_mesh(name, 2, 3)
    links = {(stage, stage + 1): True for stage in range(mesh.stages - 1)} | {(0, 2): True}
    schedule = lower(build_schedule(name, mesh, 4), mesh, links)
    cells = [(rank, n) for rank, row in schedule.items() for n, action in enumerate(row) if action.kind not in COMPUTE]
    rank, n = data.draw(st.sampled_from(cells))
    action = schedule[rank].pop(n)
    with pytest.raises(ScheduleError, match=str(action)):
        check(schedule, mesh, links)


def test_middle_rank_of_an_odd_depth_sums_its_stage_once() -> None:
    mesh = mesh_for("master", groups=1, depth=3)
    links = {(0, 1): True, (1, 2): True}
    schedule = lower(build_schedule("master", mesh, 2), mesh, links)
    sums = [str(action) for action in schedule[1] if action.kind is Kind.REDUCE]
    assert sums == [], "no other rank holds stage 1"
    two_groups = mesh_for("master", groups=2, depth=3)
    schedule = lower(build_schedule("master", two_groups, 4), two_groups, links)
    assert [str(action) for action in schedule[1] if action.kind is Kind.REDUCE] == ["1REDUCE"]
    check(schedule, two_groups, links)


def test_two_ranks_that_wait_for_each_other() -> None:
    """Each computes the other's input only after its own."""
    mesh = Mesh(1, (0, 1), replicas=2)
    rows = (
        "1:1RECV_F1<0 1:1F1 0F0 0SEND_F0>1 1:1B1 1:1SEND_B1>0 0RECV_B0<1 0B0 0REDUCE 1:1REDUCE",
        "1RECV_F0<0 1F0 1:0F1 1:0SEND_F1>1 1B0 1SEND_B0>0 1:0RECV_B1<1 1:0B1 1:0REDUCE 1REDUCE",
    )
    assert faults(*rows, mesh=mesh) == [
        "rank 0, position 1, 1:1F1: waits for ever for 1:0SEND_F1>1",
        "rank 1, position 1, 1F0: waits for ever for 0SEND_F0>1",
    ]


def test_chunks_of_one_rank_hand_over_without_messages() -> None:
    one_rank = Mesh(1, (0, 0))
    assert faults("1F0 0F0 1B0 0B0", mesh=one_rank) == ["rank 0, position 0, 1F0: waits for ever for 0F0"]
