"""What ``check`` proves of a schedule's computations, messages and sums, and what it says of one that is wrong."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel.schedule.action import COMPUTE
from parallel.schedule.check import check
from parallel.schedule.dependencies import Links
from parallel.schedule.generators import gpipe, one_f_one_b
from parallel.schedule.mesh import Mesh
from parallel.schedule.passes import lower
from parallel.schedule.registry import SCHEDULES, build_schedule
from parallel.schedule.text import SHOWN, ScheduleError
from tests.helpers.schedules import PAIR, TWO_RANKS, chain, rows, small_mesh

CHAIN, ALONE = {(0, 1): True}, Mesh(1, (0,))
CHUNKS = Mesh(1, (0, 1, 0, 1))
RIGHT = "0F0 0F1 0B0 0B1 | 1F0 1B0 1F1 1B1"
FIRST = "0F0 0SEND_F0>1 0F1 0SEND_F1>1 0RECV_B0<1 0B0 0RECV_B1<1 0B1"
SECOND = "1RECV_F0<0 1F0 1B0 1SEND_B0>0 1RECV_F1<0 1F1 1B1 1SEND_B1>0"
SUMMED = "0F0 0B0 0REDUCE | "
"""The first of two groups of one rank."""
PAIRED = "0F0 0SEND_F0>1 1:1RECV_F1<0 1:1F1 1:1B1 1:1SEND_B1>0 0RECV_B0<1 0B0 0REDUCE 1:1REDUCE | 1:0F1 1:0SEND_F1>1 "


def faults(text: str, mesh: Mesh = TWO_RANKS, links: Links = CHAIN) -> list[str]:
    with pytest.raises(ScheduleError) as error:
        check(rows(*text.split(" | ")), mesh, links)
    return [str(fault) for fault in error.value.faults]


@pytest.mark.parametrize(
    ("text", "mesh", "links"),
    [
        (RIGHT, TWO_RANKS, CHAIN),
        ("0F0 0F1 0B0 0B1 | 1F1 1B1 1F0 1B0", TWO_RANKS, CHAIN),  # ranks take microbatches in different orders
        ("0F0 0B0 0F1 0B1 | 1F0 1F1 1B0 1B1", TWO_RANKS, {(0, 1): False}),  # no gradient is waited for
        ("0F0 0I0 0F1 0W0 0B1 | 1F0 1I0 1F1 1B1 1W0", TWO_RANKS, CHAIN),  # I feeds earlier stages before W is done
        ("0F0 0F1 0B0 0B1 0U0 0U1 | 1F0 1B0 1U0 1F1 1B1 1U1", TWO_RANKS, CHAIN),  # updates later than they could be
        (f"{FIRST} | {SECOND}", TWO_RANKS, CHAIN),
        (SUMMED + "0F1 0B1 0REDUCE", Mesh(2, (0,)), {}),
        ("0F0 2F0 2B0 0B0 | 1F0 3F0 3B0 1B0", CHUNKS, chain(CHUNKS)),
        (PAIRED + "1RECV_F0<0 1F0 1B0 1SEND_B0>0 1:0RECV_B1<1 1:0B1 1:0REDUCE 1REDUCE", PAIR, CHAIN),
    ],
)
def test_right_schedules(text: str, mesh: Mesh, links: Links) -> None:
    check(rows(*text.split(" | ")), mesh, links)


WITHOUT_RECEIVE = SECOND.replace("1RECV_F1<0 ", "")
NEEDED = "stands before the computation that makes what it sends"
FAULTS = [
    ("0F0 1F0 0B0 | 1B0", "rank 0, position 1, 1F0: stage 1 of replica 0 is on rank 1"),
    ("0F0 0F1 0B0 0B1 | 1F0 1B0 1B1", "rank 1, 1F1: is missing"),
    ("0F0 0F1 0B0 | 1F0 1B0 1F1 1B1", "rank 0, 0B1: is missing"),
    ("0F0 0F1 0B0 0I1 | 1F0 1B0 1F1 1B1", "rank 0, 0W1: is missing"),
    ("0F0 0F1 0B0 0W1 | 1F0 1B0 1F1 1B1", "rank 0, 0I1: is missing"),
    ("0F0 0B0 0F2 0B2 | 1F0 1B0 1F2 1B2", "microbatch 1 is not computed"),
    ("0F0 0F1 0F0 0B0 0B1 | 1F0 1B0 1F1 1B1", "rank 0, position 2, 0F0: stands on rank 0, position 0 already"),
    ("0F0 0B0 0I0 0W0 | 1F0 1B0", "rank 0, 0B0: is there, and 0I0 and 0W0 too"),
    ("0B0 0F0 | 1F0 1B0", "rank 0, position 0, 0B0: stands before 0F0, position 1"),
    ("0F0 0B0 | 1B0 1F0", "rank 1, position 0, 1B0: stands before 1F0, position 1"),
    ("0F0 0B0 | 1I0 1F0 1W0", "rank 1, position 0, 1I0: stands before 1F0, position 1"),
    ("0F0 0W0 0I0 | 1F0 1B0", "rank 0, position 1, 0W0: stands before 0I0, position 2"),
    ("0R0 0F0 0B0 | 1F0 1B0", "rank 0, position 0, 0R0: stands before 0F0, position 1"),
    ("0F0 0B0 0R0 | 1F0 1B0", "rank 0, position 1, 0B0: stands before 0R0, position 2"),
    ("0F0 0U0 0B0 | 1F0 1B0 1U0", "rank 0, position 1, 0U0: stands before 0B0, position 2"),
    ("0F0 0B0 0U0 | 1F0 1B0", "rank 1, 1U0: is missing"),
    # Faults in a cell come before what is missing.
    ("0F0 0F1 0B0 | 1F0 1B1 1F1 1B0", "rank 1, position 1, 1B1: stands before 1F1", "rank 0, 0B1: is missing"),
    (
        "0F0 0B0 0F1 0B1 | 1F0 1F1 1B0 1B1",
        "rank 0, position 1, 0B0: waits for ever for 1B0",
        "rank 1, position 1, 1F1: waits for ever for 0F1",
    ),
    (f"{FIRST} | {WITHOUT_RECEIVE}", "rank 0, position 3, 0SEND_F1>1: 1RECV_F1<0 is missing on rank 1"),
    (
        f"{FIRST} | {SECOND.replace(' 1SEND_B0>0', '')}",
        "rank 0, position 4, 0RECV_B0<1: 1SEND_B0>0 is missing on rank 1",
    ),
    (
        f"{FIRST.replace('0SEND_F1>1 ', '')} | {WITHOUT_RECEIVE}",
        "rank 1, position 4, 1F1: 1RECV_F1<0 is missing, and its send",
    ),
    (
        f"{FIRST.replace('0SEND_F1>1', '0SEND_F1>1 0SEND_F1>1')} | {SECOND}",
        "rank 0, position 4, 0SEND_F1>1: stands on rank 0, position 3 already",
    ),
    (f"{FIRST.replace('0F1 0SEND_F1>1', '0SEND_F1>1 0F1')} | {SECOND}", f"rank 0, position 2, 0SEND_F1>1: {NEEDED}"),
    (f"{FIRST} | {SECOND.replace('1B0 1SEND_B0>0', '1SEND_B0>0 1B0')}", f"rank 1, position 2, 1SEND_B0>0: {NEEDED}"),
    (
        f"{FIRST} | {SECOND.replace('1B0 1SEND_B0>0', '1SEND_B0>0 1I0 1W0')}",
        f"rank 1, position 2, 1SEND_B0>0: {NEEDED}",
    ),
    (
        f"{FIRST} | {SECOND.replace('1RECV_F1<0 1F1', '1F1 1RECV_F1<0')}",
        "rank 1, position 4, 1F1: stands before 1RECV_F1<0",
    ),
    # With tags both would arrive; a channel without tags hands microbatch 0 to the receive of microbatch 1.
    (
        f"{FIRST} | 1RECV_F1<0 1RECV_F0<0 1F0 1B0 1SEND_B0>0 1F1 1B1 1SEND_B1>0",
        "rank 1, position 0, 1RECV_F1<0: rank 0 sends 0SEND_F0>1 before that",
    ),
    # A value comes with its message, not with its computation.
    (
        f"0F0 0F1 0RECV_B0<1 0RECV_B1<1 0B0 0B1 0SEND_F0>1 0SEND_F1>1 | {SECOND}",
        "rank 1, position 1, 1F0: waits for ever for 0SEND_F0>1",
        "rank 0, position 4, 0B0: waits for ever for 1SEND_B0>0",
    ),
]
MESSAGE = "0F0 0SEND_F0>1 0B0 | 1RECV_F0<0 1F0 1B0 1SEND_B0>0"
ON_MESHES = [
    # Backward before forward that blocks no one: progress alone would not see it.
    ("0F0 0B0 | 1B0 1F0", TWO_RANKS, {(0, 1): False}, "rank 1, position 0, 1B0: stands before 1F0"),
    (
        *(MESSAGE, TWO_RANKS, {}),
        "rank 1, position 0, 1RECV_F0<0: nothing passes from stage 0 to stage 1",
        "rank 0, position 1, 0SEND_F0>1: nothing passes from stage 0 to stage 1",
        "rank 1, position 3, 1SEND_B0>0: nothing passes from stage 0 to stage 1",
    ),
    (MESSAGE, TWO_RANKS, {(0, 1): False}, "rank 1, position 3, 1SEND_B0>0: no gradient flows from stage 1 back"),
    (
        *("0F0 0SEND_F0>1 1RECV_F0<0 1F0 1B0 0B0", Mesh(1, (0, 0)), CHAIN),
        "rank 0, position 1, 0SEND_F0>1: stage 1 is on this rank too",
        "rank 0, position 2, 1RECV_F0<0: stage 0 is on this rank too",
    ),
    # Replicas share the channel between two ranks.
    (
        PAIRED + "1:0RECV_B1<1 1RECV_F0<0 1F0 1B0 1SEND_B0>0 1:0B1 1:0REDUCE 1REDUCE",
        *(PAIR, CHAIN, "rank 1, position 2, 1:0RECV_B1<1: rank 0 sends 0SEND_F0>1 before that"),
    ),
    # Each of two ranks computes the other's input only after its own.
    (
        "1:1RECV_F1<0 1:1F1 0F0 0SEND_F0>1 1:1B1 1:1SEND_B1>0 0RECV_B0<1 0B0 0REDUCE 1:1REDUCE | "
        "1RECV_F0<0 1F0 1:0F1 1:0SEND_F1>1 1B0 1SEND_B0>0 1:0RECV_B1<1 1:0B1 1:0REDUCE 1REDUCE",
        *(PAIR, CHAIN, "rank 0, position 1, 1:1F1: waits for ever for 1:0SEND_F1>1"),
        "rank 1, position 1, 1F0: waits for ever for 0SEND_F0>1",
    ),
    ("1F0 0F0 1B0 0B0", Mesh(1, (0, 0)), CHAIN, "rank 0, position 0, 1F0: waits for ever for 0F0"),
    (SUMMED + "0F1 0B1", Mesh(2, (0,)), {}, "rank 1, 0REDUCE: is missing"),
    (SUMMED + "0F1 0REDUCE 0B1", Mesh(2, (0,)), {}, "rank 1, position 1, 0REDUCE: stands before the last backward"),
    (SUMMED + "0F1 0I1 0REDUCE 0W1", Mesh(2, (0,)), {}, "rank 1, position 2, 0REDUCE: stands before the last backward"),
    (SUMMED + "0F1 0B1 0REDUCE 0REDUCE", Mesh(2, (0,)), {}, "rank 1, position 3, 0REDUCE: rank 0 sums .* 1x, .* 2x"),
    (
        "0F0 1F0 1B0 0B0 1REDUCE 0REDUCE | 0F1 1F1 1B1 0B1 0REDUCE 1REDUCE",
        *(Mesh(2, (0, 0)), CHAIN, r"rank 1, position 4, 0REDUCE: rank 0 sums stages \[1, 0\] .*\[0, 1\]"),
    ),
    *((text, ALONE, {}, rf"rank 0, position \d, {place}: stands before") for text, place in (
        ("0O0 0F0 0P0 0B0", "0O0"), ("0F0 0P0 0O0 0B0", "0P0"), ("0F0 0O0 0B0 0P0", "0B0"),
    )),
]  # fmt: skip


@pytest.mark.parametrize("case", [(text, TWO_RANKS, CHAIN, *said) for text, *said in FAULTS] + ON_MESHES)
def test_faults(case: tuple[str, Mesh, Links, str]) -> None:
    text, mesh, links, *expected = case
    found = faults(text, mesh, links)
    assert len(found) == len(expected)
    assert all(re.match(words, fault) for words, fault in zip(expected, found, strict=True)), found


@pytest.mark.parametrize(
    ("text", "mesh", "expected"),
    [
        ("0F0 0B0 1:0F1 1:0B1 | 1F0 1B0 1:1F1 1:1B1", PAIR, "rank 0, position 2, 1:0F1: stage 0 of replica 1 is on"),
        ("0F0 0B0 2F0 | 1F0 1B0 1:1F0", TWO_RANKS, "rank 0, position 2, 2F0: there are 2 stages in 1 replicas"),
        ("0F0 0B0 2F0 | 1F0 1B0 1:1F0", TWO_RANKS, "rank 1, position 2, 1:1F0: there are 2 stages in 1 replicas"),
        (RIGHT, Mesh(1, (0, 1, 2)), "rank 2: has no row"),
        (RIGHT + " | 2F0 2B0", TWO_RANKS, "rank 2: has a row"),
        (
            "0F0 0B0 | 1F0 1B0 | 0F0 0B0 | 1F0 1B0",
            Mesh(2, (0, 1)), "rank 2, position 0, 0F0: microbatch 0 is in group 0, replica 0, not in 1, 0"),
        (
            "0F0 0B0 1:1F0 1:1B0 | 1F0 1B0 1:0F0 1:0B0",
            PAIR, "rank 0, position 2, 1:1F0: microbatch 0 is in group 0, replica 0, not in 0, 1"),
    ],
)  # fmt: skip
def test_faults_among_others(text: str, mesh: Mesh, expected: str) -> None:
    assert [fault for fault in faults(text, mesh) if fault.startswith(expected)]


def test_schedule_that_computes_nothing() -> None:
    for schedule in ({}, {0: [], 1: []}):
        with pytest.raises(ScheduleError, match="no microbatch is computed"):
            check(schedule, TWO_RANKS, CHAIN)


def test_skip_that_the_order_does_not_serve() -> None:
    """Right for a chain of chunks, but stage 2 also feeds stage 1, which comes earlier."""
    found = faults("0F0 2F0 2B0 0B0 | 1F0 3F0 3B0 1B0", CHUNKS, chain(CHUNKS) | {(2, 1): True})
    assert "rank 1, position 0, 1F0: waits for ever for 2F0" in found


def test_message_shows_the_grid_with_the_first_faulty_cell_marked() -> None:
    schedule = one_f_one_b(2, 30)
    schedule[1][20], schedule[1][21] = schedule[1][21], schedule[1][20]
    with pytest.raises(ScheduleError) as error:
        check(schedule, TWO_RANKS, CHAIN)
    assert str(error.value).splitlines()[1:] == [
        "  rank 1, position 20, 1B10: stands before 1F10, position 21",
        "rank 0 | ... 0B6 0F8 0B7 0F9 0B8 0F10 0B9      0F11 0B10 0F12 0B11 0F13 0B12 ...",
        "rank 1 | ... 1F7 1B7 1F8 1B8 1F9 1B9  >>1B10<< 1F10 1F11 1B11 1F12 1B12 1F13 ...",
    ]


def test_all_faults_are_kept_and_the_first_ones_shown() -> None:
    schedule = gpipe(2, 40)
    schedule[1] = []
    with pytest.raises(ScheduleError, match=rf"80 faults:(\n  .*){{{SHOWN}}}\n  and 60 more\nrank 0") as error:
        check(schedule, TWO_RANKS, CHAIN)
    assert len(error.value.faults) == 80


@given(data=st.data())
def test_any_schedule_with_an_action_taken_out_doubled_or_moved_to_another_rank_is_refused(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(SCHEDULES)))
    mesh = small_mesh(name, depth=3)
    schedule = build_schedule(name, mesh, 2 if name == "mast" else 4)
    rank = data.draw(st.sampled_from(sorted(schedule)))
    position = data.draw(st.integers(min_value=0, max_value=len(schedule[rank]) - 1))
    action, change = schedule[rank][position], data.draw(st.sampled_from(["out", "doubled", "moved"]))
    target = (rank + 1) % 3 if change == "moved" else rank
    if change != "doubled":
        del schedule[rank][position]
    if change != "out":
        schedule[target].append(action)
    with pytest.raises(ScheduleError) as error:
        check(schedule, mesh, chain(mesh))
    place = f"rank {target}, position {len(schedule[target]) - 1}, {action}"
    expected = {
        "out": f"rank {rank}, {action}: is missing",
        "doubled": f"{place}: stands on rank {rank}, position {position} already",
        "moved": f"{place}: stage {action.stage} of replica {action.replica} is on rank {rank} of this group",
    }[change]
    assert expected in [str(fault) for fault in error.value.faults]


@given(data=st.data())
def test_any_lowered_schedule_with_a_message_or_sum_taken_out_is_refused(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(SCHEDULES)))
    mesh = small_mesh(name, 2, 3)
    links = chain(mesh) | {(0, 2): True}
    schedule = lower(build_schedule(name, mesh, 4), mesh, links)
    cells = [(rank, n) for rank, row in schedule.items() for n, action in enumerate(row) if action.kind not in COMPUTE]
    rank, n = data.draw(st.sampled_from(cells))
    action = schedule[rank].pop(n)
    with pytest.raises(ScheduleError, match=str(action)):
        check(schedule, mesh, links)
