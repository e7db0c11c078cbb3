"""What ``check`` proves of a schedule's computations, and what it says of one that is wrong."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel.schedule.check import check
from parallel.schedule.generators import gpipe, one_f_one_b
from parallel.schedule.mesh import Mesh
from parallel.schedule.registry import SCHEDULES, build_schedule
from parallel.schedule.text import SHOWN, ScheduleError, from_csv
from tests.helpers.schedules import PAIR, TWO_RANKS, small_mesh

CHAIN = {(0, 1): True}
RIGHT = "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"


def faults(text: str, mesh: Mesh = TWO_RANKS, links: dict[tuple[int, int], bool] | None = None) -> list[str]:
    with pytest.raises(ScheduleError) as error:
        check(from_csv(text), mesh, CHAIN if links is None else links)
    return [str(fault) for fault in error.value.faults]


@pytest.mark.parametrize(
    ("text", "links"),
    [
        (RIGHT, CHAIN),
        ("0F0,0F1,0B0,0B1\n1F1,1B1,1F0,1B0\n", CHAIN),  # ranks take microbatches in different orders
        ("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n", {(0, 1): False}),  # no gradient is waited for
        ("0F0,0I0,0F1,0W0,0B1\n1F0,1I0,1F1,1B1,1W0\n", CHAIN),  # I feeds earlier stages before W is done
        ("0F0,0F1,0B0,0B1,0U0,0U1\n1F0,1B0,1U0,1F1,1B1,1U1\n", CHAIN),  # updates later than they could be
    ],
)
def test_right_schedules(text: str, links: dict[tuple[int, int], bool]) -> None:
    check(from_csv(text), TWO_RANKS, links)


FAULTS = [
    ("0F0,1F0,0B0\n1B0\n", "rank 0, position 1, 1F0: stage 1 of replica 0 is on rank 1 of this group"),
    ("0F0,0F1,0B0,0B1\n1F0,1B0,1B1\n", "rank 1, 1F1: is missing"),
    ("0F0,0F1,0B0\n1F0,1B0,1F1,1B1\n", "rank 0, 0B1: is missing"),
    ("0F0,0F1,0B0,0I1\n1F0,1B0,1F1,1B1\n", "rank 0, 0W1: is missing"),
    ("0F0,0F1,0B0,0W1\n1F0,1B0,1F1,1B1\n", "rank 0, 0I1: is missing"),
    ("0F0,0B0,0F2,0B2\n1F0,1B0,1F2,1B2\n", "microbatch 1 is not computed; microbatches are counted from 0"),
    ("0F0,0F1,0F0,0B0,0B1\n1F0,1B0,1F1,1B1\n", "rank 0, position 2, 0F0: stands on rank 0, position 0 already"),
    ("0F0,0B0,0I0,0W0\n1F0,1B0\n", "rank 0, 0B0: is there, and 0I0 and 0W0 too: one backward pass a microbatch"),
    ("0B0,0F0\n1F0,1B0\n", "rank 0, position 0, 0B0: stands before 0F0, position 1"),
    ("0F0,0B0\n1B0,1F0\n", "rank 1, position 0, 1B0: stands before 1F0, position 1"),
    ("0F0,0B0\n1I0,1F0,1W0\n", "rank 1, position 0, 1I0: stands before 1F0, position 1"),
    ("0F0,0W0,0I0\n1F0,1B0\n", "rank 0, position 1, 0W0: stands before 0I0, position 2"),
    ("0R0,0F0,0B0\n1F0,1B0\n", "rank 0, position 0, 0R0: stands before 0F0, position 1"),
    ("0F0,0B0,0R0\n1F0,1B0\n", "rank 0, position 1, 0B0: stands before 0R0, position 2"),
    ("0F0,0U0,0B0\n1F0,1B0,1U0\n", "rank 0, position 1, 0U0: stands before 0B0, position 2"),
    ("0F0,0B0,0U0\n1F0,1B0\n", "rank 1, 1U0: is missing"),
    # Faults in a cell come before what is missing.
    (
        "0F0,0F1,0B0\n1F0,1B1,1F1,1B0\n",
        "rank 1, position 1, 1B1: stands before 1F1, position 2",
        "rank 0, 0B1: is missing",
    ),
    (
        "0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n",
        "rank 0, position 1, 0B0: waits for ever for 1B0",
        "rank 1, position 1, 1F1: waits for ever for 0F1",
    ),
]


@pytest.mark.parametrize("texts", FAULTS)
def test_faults(texts: tuple[str, ...]) -> None:
    text, *expected = texts
    assert faults(text) == expected


@pytest.mark.parametrize(
    ("text", "mesh", "expected"),
    [
        (
            "0F0,0B0,1:0F1,1:0B1\n1F0,1B0,1:1F1,1:1B1\n",
            PAIR,
            "rank 0, position 2, 1:0F1: stage 0 of replica 1 is on rank 1 of this group",
        ),
        (
            "0F0,0B0,2F0\n1F0,1B0,1:1F0\n",
            TWO_RANKS,
            "rank 0, position 2, 2F0: there are 2 stages in 1 replicas, counted from 0",
        ),
        (
            "0F0,0B0,2F0\n1F0,1B0,1:1F0\n",
            TWO_RANKS,
            "rank 1, position 2, 1:1F0: there are 2 stages in 1 replicas, counted from 0",
        ),
        (RIGHT, Mesh(1, (0, 1, 2)), "rank 2: has no row in the schedule, which is for 1 x 3 ranks"),
        (RIGHT + "2F0,2B0\n", TWO_RANKS, "rank 2: has a row in the schedule, which is for 1 x 2 ranks"),
        (
            "0F0,0B0\n1F0,1B0\n0F0,0B0\n1F0,1B0\n",
            Mesh(2, (0, 1)),
            "rank 2, position 0, 0F0: microbatch 0 is in group 0, replica 0, not in 1, 0",
        ),
        (
            "0F0,0B0,1:1F0,1:1B0\n1F0,1B0,1:0F0,1:0B0\n",
            PAIR,
            "rank 0, position 2, 1:1F0: microbatch 0 is in group 0, replica 0, not in 0, 1",
        ),
    ],
)
def test_faults_among_others(text: str, mesh: Mesh, expected: str) -> None:
    assert expected in faults(text, mesh)


def test_schedule_that_computes_nothing() -> None:
    for schedule in ({}, {0: [], 1: []}):
        with pytest.raises(ScheduleError, match="no microbatch is computed"):
            check(schedule, TWO_RANKS, CHAIN)


def test_backward_before_forward_that_blocks_no_one() -> None:
    """The last stage of a microbatch that no other waits for: progress alone would not see it."""
    assert faults("0F0,0B0\n1B0,1F0\n", links={(0, 1): False}) == [
        "rank 1, position 0, 1B0: stands before 1F0, position 1"
    ]


def test_skip_that_the_order_does_not_serve() -> None:
    """Right for a chain of chunks, but stage 2 also feeds stage 1, which comes earlier."""
    text, mesh = "0F0,2F0,2B0,0B0\n1F0,3F0,3B0,1B0\n", Mesh(1, (0, 1, 0, 1))
    chain = {(0, 1): True, (1, 2): True, (2, 3): True}
    check(from_csv(text), mesh, chain)
    assert "rank 1, position 0, 1F0: waits for ever for 2F0" in faults(text, mesh, chain | {(2, 1): True})


def test_message_shows_the_grid_with_the_first_faulty_cell_marked() -> None:
    schedule = one_f_one_b(2, 30)
    schedule[1][20], schedule[1][21] = schedule[1][21], schedule[1][20]
    with pytest.raises(ScheduleError) as error:
        check(schedule, TWO_RANKS, CHAIN)
    assert str(error.value).splitlines() == [
        "the schedule cannot be run, 1 fault:",
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
    links = {(stage, stage + 1): True for stage in range(mesh.stages - 1)}
    rank = data.draw(st.sampled_from(sorted(schedule)))
    position = data.draw(st.integers(min_value=0, max_value=len(schedule[rank]) - 1))
    action = schedule[rank][position]
    match data.draw(st.sampled_from(["out", "doubled", "moved"])):
        case "out":
            del schedule[rank][position]
            expected = f"rank {rank}, {action}: is missing"
        case "doubled":
            schedule[rank].append(action)
            last = len(schedule[rank]) - 1
            expected = f"rank {rank}, position {last}, {action}: stands on rank {rank}, position {position} already"
        case _:
            del schedule[rank][position]
            other = (rank + 1) % 3
            schedule[other].append(action)
            expected = (
                f"rank {other}, position {len(schedule[other]) - 1}, {action}: "
                f"stage {action.stage} of replica {action.replica} is on rank {rank} of this group"
            )
    with pytest.raises(ScheduleError) as error:
        check(schedule, mesh, links)
    assert expected in [str(fault) for fault in error.value.faults]
