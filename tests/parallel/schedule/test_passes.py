"""What lowering adds: recomputation, messages as early as they should be, sums in one order, and copies to the host and
back where there is the time."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel.schedule.action import BEGINS_BACKWARD, COMPUTE, PER_PEER, SENDS, Action, Kind, Schedule
from parallel.schedule.check import check
from parallel.schedule.dependencies import Dependencies, Links
from parallel.schedule.mesh import Mesh
from parallel.schedule.passes import add_communication, add_offload, add_recompute, add_reduction, in_order, lower
from parallel.schedule.registry import SCHEDULES, build_schedule, mesh_for
from parallel.schedule.simulate import simulate
from parallel.schedule.text import ScheduleError, from_csv, to_csv
from parallel.schedule.timeline import LinkCost, StageCost
from tests.helpers.schedules import PAIR, TWO_RANKS, chain, meshes, rows, small_mesh, texts


def reduced(schedule: Schedule, mesh: Mesh, **how: bool) -> Schedule:
    return add_reduction(schedule, mesh, chain(mesh), **how)


def test_everything_of_a_small_step() -> None:
    schedule = rows("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1")
    assert texts(lower(schedule, TWO_RANKS, {(0, 1): True}, recompute=True)) == [
        "0F0 0SEND_F0>1 0F1 0SEND_F1>1 0RECV_B0<1 0R0 0B0 0RECV_B1<1 0R1 0B1",
        "1RECV_F0<0 1F0 1RECV_F1<0 1B0 1SEND_B0>0 1F1 1B1 1SEND_B1>0",
    ]


def test_sums_of_a_pair() -> None:
    schedule = rows("0F0 0B0 1:1F1 1:1B1", "1F0 1B0 1:0F1 1:0B1")
    assert texts(reduced(schedule, PAIR)) == [
        "0F0 0B0 1:1F1 1:1B1 1:1REDUCE 0REDUCE",
        "1F0 1B0 1:0F1 1REDUCE 1:0B1 1:0REDUCE",
    ]


def test_sums_at_the_end_of_everything() -> None:
    schedule = rows("0F0 0B0 1:1F1 1:1B1", "1F0 1B0 1:0F1 1:0B1")
    assert texts(reduced(schedule, PAIR, at_end=True)) == [
        "0F0 0B0 1:1F1 1:1B1 1:1REDUCE 0REDUCE",
        "1F0 1B0 1:0F1 1:0B1 1REDUCE 1:0REDUCE",
    ]
    sent = lower(schedule, PAIR, chain(PAIR), reduce_at_end=True)
    assert [row.split()[-2:] for row in texts(sent)] == [["1:1REDUCE", "0REDUCE"], ["1REDUCE", "1:0REDUCE"]]
    assert [[a for a in row.split() if "REDUCE" not in a] for row in texts(sent)] == [
        [a for a in row.split() if "REDUCE" not in a] for row in texts(lower(schedule, PAIR, chain(PAIR)))
    ]
    # One that no microbatch went through is summed, too.
    without = reduced(rows("0F0 0B0", "1F0 1B0"), PAIR, at_end=True)
    assert texts(without) == ["0F0 0B0 1:1REDUCE 0REDUCE", "1F0 1B0 1REDUCE 1:0REDUCE"]


def test_stage_that_is_complete_first_is_summed_first() -> None:
    schedule = rows("0F0 1F0 1B0 0B0", "0F1 1F1 1B1 0B1")
    assert texts(reduced(schedule, Mesh(2, (0, 0)))) == [
        "0F0 1F0 1B0 1REDUCE 0B0 0REDUCE",
        "0F1 1F1 1B1 1REDUCE 0B1 0REDUCE",
    ]


def test_sums_follow_the_sends_that_others_wait_for() -> None:
    lowered = lower(rows("0F0 0B0 1:1F1 1:1B1", "1F0 1B0 1:0F1 1:0B1"), PAIR, {(0, 1): True})
    assert texts(lowered)[0].endswith("1:1B1 1:1SEND_B1>0 1:1REDUCE 0REDUCE")
    assert texts(lower(rows("0F0 0B0", "0F1 0B1"), Mesh(2, (0,)), {})) == ["0F0 0B0 0REDUCE", "0F1 0B1 0REDUCE"]


def test_copy_without_microbatches_is_summed() -> None:
    assert texts(reduced(rows("0F0 0B0", "1F0 1B0"), PAIR)) == [
        "0F0 1:1REDUCE 0B0 0REDUCE",
        "1F0 1B0 1REDUCE 1:0REDUCE",
    ]


def test_middle_rank_sums_its_two_replicas_once() -> None:
    mesh = mesh_for("master", groups=2, depth=3)
    lowered = reduced(build_schedule("master", mesh, 8), mesh)
    assert [str(action) for action in lowered[1] if action.kind is Kind.REDUCE] == ["1REDUCE"]
    alone = mesh_for("master", groups=1, depth=3)
    assert Kind.REDUCE not in {a.kind for a in reduced(build_schedule("master", alone, 4), alone)[1]}


def test_no_gradient_back_along_a_link_without() -> None:
    schedule = rows("0F0 0B0", "1F0 1B0")
    assert texts(add_communication(schedule, TWO_RANKS, {(0, 1): False})) == [
        "0F0 0SEND_F0>1 0B0",
        "1RECV_F0<0 1F0 1B0",
    ]


def test_skip_goes_straight_to_its_stage() -> None:
    mesh = Mesh(1, (0, 1, 2))
    schedule = build_schedule("mp-basic", mesh, 1)
    assert texts(add_communication(schedule, mesh, chain(mesh) | {(0, 2): True})) == [
        "0F0 0SEND_F0>1 0SEND_F0>2 0RECV_B0<1 0RECV_B0<2 0B0",
        "1RECV_F0<0 1F0 1SEND_F0>2 1RECV_B0<2 1B0 1SEND_B0>0",
        "2RECV_F0<0 2RECV_F0<1 2F0 2B0 2SEND_B0>1 2SEND_B0>0",
    ]


def test_receive_is_announced_earlier_where_the_channel_asks_for_it() -> None:
    # Stage 3 needs the skip of microbatch 0 last, though it was sent first.
    mesh = Mesh(1, (0, 1, 0, 1))
    links = chain(mesh) | {(0, 3): True}
    lowered = add_communication(build_schedule("interleaved", mesh, 2), mesh, links)
    received = [str(a) for a in lowered[1] if a.kind is Kind.RECEIVE_FORWARD]
    assert received == ["1RECV_F0<0", "3RECV_F0<0", "1RECV_F1<0", "3RECV_F1<0", "3RECV_F0<2", "3RECV_F1<2"]


@given(meshes(), st.booleans())
def test_compute_actions_stay_as_they_were(mesh: tuple[Schedule, Mesh, Links], recompute: bool) -> None:
    schedule, mesh, links = mesh
    lowered = lower(schedule, mesh, links, recompute=recompute)
    added = PER_PEER | {Kind.REDUCE, Kind.RECOMPUTE}
    assert {rank: [a for a in actions if a.kind not in added] for rank, actions in lowered.items()} == schedule


@given(meshes())
def test_every_link_between_ranks_has_its_messages(mesh: tuple[Schedule, Mesh, Links]) -> None:
    schedule, mesh, links = mesh
    lowered = add_communication(schedule, mesh, links)
    got = sorted(str(a) for actions in lowered.values() for a in actions if a.kind in PER_PEER)
    expected = []
    for actions in schedule.values():
        for action in actions:
            for (source, target), back in links.items():
                if mesh.team_at(source) == mesh.team_at(target):
                    continue
                if action.kind is Kind.FORWARD and action.stage == source:
                    send = replace(action, kind=Kind.SEND_FORWARD, peer=target)
                elif action.kind in BEGINS_BACKWARD and action.stage == target and back:
                    send = replace(action, kind=Kind.SEND_BACKWARD, peer=source)
                else:
                    continue
                expected += [str(send), str(send.other_end)]
    assert got == sorted(expected)


@given(meshes())
def test_channels_are_first_in_first_out(mesh: tuple[Schedule, Mesh, Links]) -> None:
    schedule, mesh, links = mesh
    sent, received = defaultdict(list), defaultdict(list)
    for rank, actions in add_communication(schedule, mesh, links).items():
        for action in actions:
            if action.kind in PER_PEER:
                assert action.peer is not None
                peer = mesh.team_at(action.peer, action.replica, rank // mesh.depth)
                if action.kind in SENDS:
                    sent[rank, peer].append(action.other_end)
                else:
                    received[peer, rank].append(action)
    assert sent == received


def device_stops(lowered: Schedule, mesh: Mesh, links: Links) -> list[int]:
    """Ranks that do not come to their end when each computation waits for all that its rank has begun: messages until
    they are sent and awaited, sums until all ranks that hold the stage have begun them."""
    between = Dependencies(mesh, links)
    passed: set[Action] = set()
    summing: dict[int, set[int]] = defaultdict(set)  # stage -> ranks
    begun: dict[int, list[Action]] = {rank: [] for rank in lowered}
    position = dict.fromkeys(lowered, 0)

    def is_over(action: Action) -> bool:
        if action.kind is Kind.REDUCE:
            return len(summing[action.stage]) == len(mesh.teams_with(action.stage))
        return action in passed and action.other_end in passed

    moved = True
    while moved:
        moved = False
        for rank, actions in lowered.items():
            while position[rank] < len(actions):
                action = actions[position[rank]]
                if action.kind in COMPUTE:
                    begun[rank] = [each for each in begun[rank] if not is_over(each)]
                    if begun[rank] or not all(map(is_over, between.receives_before(action, rank))):
                        break
                elif action.kind is Kind.REDUCE:
                    begun[rank].append(action)
                    summing[action.stage].add(rank)
                elif action.kind in PER_PEER:
                    begun[rank].append(action)
                    passed.add(action)
                position[rank] += 1
                moved = True
    return [rank for rank, n in sorted(position.items()) if n < len(lowered[rank])]


@given(meshes(), st.booleans())
def test_no_rank_gets_stuck_where_each_action_waits_for_its_device(
    mesh: tuple[Schedule, Mesh, Links], recompute: bool
) -> None:
    """A device has come to its end once the messages and sums before are over, as those of NCCL are kernels."""
    schedule, mesh, links = mesh
    lowered = lower(schedule, mesh, links, recompute=recompute)
    assert not device_stops(lowered, mesh, links), texts(lowered)


@pytest.mark.parametrize("depth", [2, 4])
@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_receives_are_posted_early_enough(name: str, depth: int) -> None:
    """At the most 2 % are lost against receives that are all posted at the beginning."""
    mesh = small_mesh(name, depth=depth)
    schedule, links = build_schedule(name, mesh, 2 if name == "mast" else 8), chain(mesh)
    costs = [StageCost(1.0 + 0.1 * (stage % 3), 2.0, 1.1, 0.9, 0) for stage in range(mesh.stages)]
    slow = {pair: LinkCost(0.1, 0.1) for pair in links}
    soonest = simulate(schedule, mesh, costs, slow).makespan_s
    assert simulate(add_communication(schedule, mesh, links), mesh, costs, slow).makespan_s <= 1.02 * soonest


@given(meshes())
def test_gradients_are_awaited_once_their_values_are_sent(mesh: tuple[Schedule, Mesh, Links]) -> None:
    schedule, mesh, links = mesh
    for actions in add_communication(schedule, mesh, links).values():
        for n, receive in enumerate(actions):
            if receive.kind is Kind.RECEIVE_BACKWARD:
                assert replace(receive, kind=Kind.SEND_FORWARD) in actions[:n]


@given(meshes())
def test_holders_sum_in_one_order_as_early_as_that_allows(mesh: tuple[Schedule, Mesh, Links]) -> None:
    schedule, mesh, links = mesh
    lowered = lower(schedule, mesh, links)
    orders = defaultdict(set)
    for rank, actions in lowered.items():
        sums = [a.stage for a in actions if a.kind is Kind.REDUCE]
        held = {stage for stage, _ in mesh.held_by(rank) if len(mesh.teams_with(stage)) > 1}
        assert sorted(sums) == sorted(held)
        for stage in sums:
            orders[mesh.teams_with(stage)].add(tuple(sums))
    # Each sum stands after what begins no later than the last action that adds to it, and before what begins later.
    places = in_order(schedule, mesh, Dependencies(mesh, links))
    ends = {a.stage: n for a, n in places.items() if a.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT)}
    for actions in lowered.values():
        for n, action in enumerate(actions):
            if action.kind is Kind.REDUCE:
                assert all(places[each] <= ends[action.stage] for each in actions[:n] if each in places)
                assert all(places[each] > ends[action.stage] for each in actions[n:] if each in places)
    assert all(len(order) == 1 for order in orders.values())


@given(meshes())
def test_recomputation_stands_before_its_backward_pass(mesh: tuple[Schedule, Mesh, Links]) -> None:
    schedule, _, _ = mesh
    for rank, actions in add_recompute(schedule).items():
        for before, action in zip(schedule[rank], schedule[rank][1:], strict=False):
            if action.kind in BEGINS_BACKWARD:
                again = replace(action, kind=Kind.RECOMPUTE)
                if before == replace(action, kind=Kind.FORWARD):
                    assert again not in actions
                else:
                    assert actions[actions.index(action) - 1] == again


@pytest.mark.parametrize("name", ["mp-basic", "gpipe", "1f1b", "zero-bubble"])
def test_one_rank_exchanges_nothing(name: str) -> None:
    mesh = mesh_for(name, groups=1, depth=1)
    schedule = build_schedule(name, mesh, 2)
    assert lower(schedule, mesh, {}) == schedule


NEEDS = (Kind.RECOMPUTE, Kind.BACKWARD, Kind.BACKWARD_INPUT)


def costs(copy_s: float) -> list[StageCost]:
    """Two stages of F = 1 and B = 2 seconds, whose activations take so long each way."""
    return [StageCost(1.0, 2.0, 1.0, 1.0, 8, copy_s, copy_s)] * 2


def test_offload_of_a_small_step() -> None:
    schedule = rows("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1")
    assert texts(lower(schedule, TWO_RANKS, chain(TWO_RANKS), offload=True)) == [
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


@given(meshes(), st.sampled_from([None, 0.0, 0.5, 3.0, 9.0]), st.booleans())
def test_out_after_forward_and_back_before_what_needs_it(
    mesh: tuple[Schedule, Mesh, Links], copy_s: float | None, recompute: bool
) -> None:
    schedule, mesh, links = mesh
    own = None if copy_s is None else costs(copy_s)[:1] * mesh.stages
    schedule = lower(schedule, mesh, links, recompute=recompute, offload=True, costs=own)
    check(schedule, mesh, links)
    assert from_csv(to_csv(schedule)) == schedule
    for actions in schedule.values():
        at = {(a.kind, a.stage, a.microbatch, a.replica): n for n, a in enumerate(actions) if a.kind not in PER_PEER}
        out = {key[1:] for key in at if key[0] is Kind.OFFLOAD}
        assert out == {key[1:] for key in at if key[0] is Kind.PREFETCH}
        for place in out:
            needs = [at[key] for kind in NEEDS if (key := (kind, *place)) in at]
            assert at[Kind.FORWARD, *place] < at[Kind.OFFLOAD, *place] < at[Kind.PREFETCH, *place] < min(needs)
    assert simulate(schedule, mesh, costs(0.0)[:1] * mesh.stages).makespan_s > 0


def test_copies_take_time_where_nothing_hides_them() -> None:
    alone = Mesh(1, (0,))
    schedule = rows("0F0 0O0 0F1 0P0 0B0 0B1")
    assert simulate(schedule, alone, costs(0.0)[:1]).makespan_s == 6
    # Out until 2.5, 1.5 after F0; back from 3.5 on until 6, half a second after B0 would have ended; then B1.
    assert simulate(schedule, alone, costs(2.5)[:1]).makespan_s == 8


@pytest.mark.parametrize("text", ["0O0 0F0 0P0 0B0", "0F0 0P0 0O0 0B0", "0F0 0O0 0B0 0P0"])
def test_wrong_order_is_found(text: str) -> None:
    with pytest.raises(ScheduleError, match="stands before"):
        check(rows(text), Mesh(1, (0,)), {})
