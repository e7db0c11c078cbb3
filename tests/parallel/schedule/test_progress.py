"""Which schedules come to their end when sends return at once, and which also when sends block."""

from __future__ import annotations

import pytest

from parallel.schedule.action import Action
from parallel.schedule.check import check
from parallel.schedule.passes import lower
from parallel.schedule.placement import Placement
from parallel.schedule.progress import Progress
from parallel.schedule.registry import SCHEDULES, build_schedule, placement_for
from parallel.schedule.text import ScheduleError, from_csv

TWO_RANKS = Placement(groups=1, depth=2, stages=2)
CHAIN = {(0, 1): True}
NAIVE_1F1B = (
    "0F0,0SEND_F0>1,0F1,0SEND_F1>1,0RECV_B0<1,0B0,0RECV_B1<1,0B1\n"
    "1RECV_F0<0,1F0,1B0,1SEND_B0>0,1RECV_F1<0,1F1,1B1,1SEND_B1>0\n"
)


def test_other_end_of_a_message() -> None:
    for send, receive in (("1:2SEND_F3>4", "1:4RECV_F3<2"), ("4SEND_B3>2", "2RECV_B3<4")):
        assert Action.parse(send).other_end == Action.parse(receive)
        assert Action.parse(receive).other_end == Action.parse(send)


def test_naive_1f1b_runs_with_buffers_and_stops_with_blocking_sends() -> None:
    report = check(from_csv(NAIVE_1F1B), TWO_RANKS, CHAIN)
    assert not report.blocking_safe
    assert [str(stop) for stop in report.rendezvous_stops] == [
        "rank 0, position 3, 0SEND_F1>1: waits for ever for 1RECV_F1<0",
        "rank 1, position 3, 1SEND_B0>0: waits for ever for 0RECV_B0<1",
    ]


def test_receive_announced_ahead_makes_it_safe() -> None:
    ahead = NAIVE_1F1B.replace("1RECV_F0<0,1F0,1B0,1SEND_B0>0,1RECV_F1<0", "1RECV_F0<0,1F0,1RECV_F1<0,1B0,1SEND_B0>0")
    assert check(from_csv(ahead), TWO_RANKS, CHAIN).blocking_safe


def test_two_ranks_that_wait_for_each_other() -> None:
    """Each computes the other's input only after its own: an error even with buffers."""
    placement = Placement(groups=1, depth=2, stages=2, replicas=2)
    rows = (
        "1:1RECV_F1<0,1:1F1,0F0,0SEND_F0>1,1:1B1,1:1SEND_B1>0,0RECV_B0<1,0B0,0REDUCE,1:1REDUCE\n"
        "1RECV_F0<0,1F0,1:0F1,1:0SEND_F1>1,1B0,1SEND_B0>0,1:0RECV_B1<1,1:0B1,1:0REDUCE,1REDUCE\n"
    )
    with pytest.raises(ScheduleError) as error:
        check(from_csv(rows), placement, CHAIN)
    assert [str(fault) for fault in error.value.faults] == [
        "rank 0, position 1, 1:1F1: waits for ever for 1:0SEND_F1>1",
        "rank 1, position 1, 1F0: waits for ever for 0SEND_F0>1",
    ]
    assert ">>1:1F1<<" in str(error.value)


def test_value_comes_with_its_message_not_with_its_computation() -> None:
    """Lowered, a stage waits for the send; compute-only, for the computation alone."""
    late = from_csv("0F0,0F1,0RECV_B0<1,0B0,0SEND_F0>1\n1RECV_F0<0,1F0,1B0,1SEND_B0>0\n")
    lowered = Progress(late, TWO_RANKS, CHAIN, lowered=True)
    assert [stop.rank for stop in lowered.buffered_stops()] == [0, 1]
    compute_only = from_csv("0F0,0B0\n1F0,1B0\n")
    assert Progress(compute_only, TWO_RANKS, CHAIN, lowered=False).buffered_stops() == []


def test_chunks_of_one_rank_hand_over_without_messages() -> None:
    one_rank = Placement(groups=1, depth=1, stages=2)
    right = Progress(from_csv("0F0,1F0,1B0,0B0\n"), one_rank, CHAIN, lowered=True)
    assert right.buffered_stops() == right.rendezvous_stops() == []
    wrong = Progress(from_csv("1F0,0F0,1B0,0B0\n"), one_rank, CHAIN, lowered=True)
    assert [str(stop) for stop in wrong.buffered_stops()] == ["rank 0, position 0, 1F0: waits for ever for 0F0"]


@pytest.mark.parametrize("name", sorted(set(SCHEDULES) - {"interleaved", "bidirectional"}))
@pytest.mark.parametrize("depth", [2, 3, 4])
def test_lowered_schedules_that_need_no_buffers(name: str, depth: int) -> None:
    placement = placement_for(name, groups=1, depth=depth)
    links = {(stage, stage + 1): True for stage in range(depth - 1)}
    schedule = lower(build_schedule(name, placement, 2 if name == "mast" else 6), placement, links)
    assert check(schedule, placement, links).blocking_safe
