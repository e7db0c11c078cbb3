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
from parallel.schedule.text import from_csv, to_csv
from parallel.schedule.timeline import LinkCost, StageCost
from tests.helpers.schedules import PAIR, TWO_RANKS, chain, meshes, rows, small_mesh, texts


def reduced(schedule: Schedule, mesh: Mesh, **how: bool) -> Schedule:
    return add_reduction(schedule, mesh, in_order(schedule, mesh, Dependencies(mesh, chain(mesh))), **how)


def costs(copy_s: float) -> list[StageCost]:
    """Two stages of F = 1 and B = 2 seconds, whose activations take so long each way."""
    return [StageCost(1.0, 2.0, 1.0, 1.0, 8, copy_s, copy_s)] * 2


ONE, TWO, FOUR = "0F0 0B0 | 1F0 1B0", "0F0 0F1 0B0 0B1 | 1F0 1B0 1F1 1B1", "0F0 0F1 0F2 0F3 0B0 0B1 0B2 0B3"
BOTH, SKIP = "0F0 0B0 1:1F1 1:1B1 | 1F0 1B0 1:0F1 1:0B1", {(0, 1): True, (1, 2): True, (0, 2): True}
LOWERED = {
    "a small step": (
        lambda: lower(rows(*TWO.split(" | ")), TWO_RANKS, chain(TWO_RANKS), recompute=True),
        "0F0 0SEND_F0>1 0F1 0SEND_F1>1 0RECV_B0<1 0R0 0B0 0RECV_B1<1 0R1 0B1",
        "1RECV_F0<0 1F0 1RECV_F1<0 1B0 1SEND_B0>0 1F1 1B1 1SEND_B1>0"),
    "one rank exchanges nothing": (lambda: lower(rows(FOUR), Mesh(1, (0,)), {}), FOUR),
    "sums of a pair": (
        lambda: reduced(rows(*BOTH.split(" | ")), PAIR),
        "0F0 0B0 1:1F1 1:1B1 1:1REDUCE 0REDUCE", "1F0 1B0 1:0F1 1REDUCE 1:0B1 1:0REDUCE"),
    "sums at the end of everything": (
        lambda: reduced(rows(*BOTH.split(" | ")), PAIR, at_end=True),
        "0F0 0B0 1:1F1 1:1B1 1:1REDUCE 0REDUCE", "1F0 1B0 1:0F1 1:0B1 1REDUCE 1:0REDUCE"),
    "a copy without microbatches is summed at the end, too": (
        lambda: reduced(rows(*ONE.split(" | ")), PAIR, at_end=True),
        "0F0 0B0 1:1REDUCE 0REDUCE", "1F0 1B0 1REDUCE 1:0REDUCE"),
    "and as early as it may be": (
        lambda: reduced(rows(*ONE.split(" | ")), PAIR), "0F0 1:1REDUCE 0B0 0REDUCE", "1F0 1B0 1REDUCE 1:0REDUCE"),
    "the stage that is complete first is summed first": (
        lambda: reduced(rows("0F0 1F0 1B0 0B0", "0F1 1F1 1B1 0B1"), Mesh(2, (0, 0))),
        "0F0 1F0 1B0 1REDUCE 0B0 0REDUCE", "0F1 1F1 1B1 1REDUCE 0B1 0REDUCE"),
    "no gradient back along a link without": (
        lambda: add_communication(rows(*ONE.split(" | ")), TWO_RANKS, {(0, 1): False}),
        "0F0 0SEND_F0>1 0B0", "1RECV_F0<0 1F0 1B0"),
    "a skip goes straight to its stage": (
        lambda: add_communication(build_schedule("mp-basic", Mesh(1, (0, 1, 2)), 1), Mesh(1, (0, 1, 2)), SKIP),
        "0F0 0SEND_F0>1 0SEND_F0>2 0RECV_B0<1 0RECV_B0<2 0B0", "1RECV_F0<0 1F0 1SEND_F0>2 1RECV_B0<2 1B0 1SEND_B0>0",
        "2RECV_F0<0 2RECV_F0<1 2F0 2B0 2SEND_B0>1 2SEND_B0>0"),
    "offload": (
        lambda: lower(rows(*TWO.split(" | ")), TWO_RANKS, chain(TWO_RANKS), offload=True, costs=costs(0.0)),
        "0F0 0SEND_F0>1 0O0 0P0 0F1 0SEND_F1>1 0O1 0RECV_B0<1 0RECV_B1<1 0P1 0B0 0B1",
        "1RECV_F0<0 1F0 1RECV_F1<0 1B0 1SEND_B0>0 1F1 1B1 1SEND_B1>0"),
    "copies that hide begin one action ahead": (
        lambda: add_offload(rows(FOUR), costs(1.0)), "0F0 0O0 0F1 0O1 0F2 0O2 0P0 0F3 0O3 0P1 0B0 0P2 0B1 0P3 0B2 0B3"),
    # Copies of 4 s: 3 beyond F, 2 before B. Between F0 and B0 are 3 s, F1 and B1 4, F2 and B2 5, F3 and B3 6.
    "offload only where there is time": (
        lambda: add_offload(rows(FOUR), costs(4.0)), "0F0 0F1 0F2 0O2 0F3 0O3 0B0 0P2 0B1 0P3 0B2 0B3"),
}  # fmt: skip


@pytest.mark.parametrize("case", LOWERED)
def test_what_is_added(case: str) -> None:
    make, *expected = LOWERED[case]
    assert texts(make()) == expected


def test_sums_at_the_end_leave_everything_else_in_its_place() -> None:
    early, late = (lower(rows(*BOTH.split(" | ")), PAIR, chain(PAIR), reduce_at_end=each) for each in (False, True))
    assert [row.split()[-2:] for row in texts(late)] == [["1:1REDUCE", "0REDUCE"], ["1REDUCE", "1:0REDUCE"]]
    assert texts(early)[0].endswith("1:1B1 1:1SEND_B1>0 1:1REDUCE 0REDUCE")
    without = [[[a for a in row.split() if "REDUCE" not in a] for row in texts(each)] for each in (early, late)]
    assert without[0] == without[1]


NEEDS = (Kind.RECOMPUTE, Kind.BACKWARD, Kind.BACKWARD_INPUT)


def test_middle_rank_sums_its_two_replicas_once() -> None:
    mesh = mesh_for("master", groups=2, depth=3)
    lowered = reduced(build_schedule("master", mesh, 8), mesh)
    assert [str(action) for action in lowered[1] if action.kind is Kind.REDUCE] == ["1REDUCE"]
    alone = mesh_for("master", groups=1, depth=3)
    assert Kind.REDUCE not in {a.kind for a in reduced(build_schedule("master", alone, 4), alone)[1]}


def test_receive_is_announced_earlier_where_the_channel_asks_for_it() -> None:
    # Stage 3 needs the skip of microbatch 0 last, though it was sent first.
    mesh = Mesh(1, (0, 1, 0, 1))
    links = chain(mesh) | {(0, 3): True}
    lowered = add_communication(build_schedule("interleaved", mesh, 2), mesh, links)
    received = [str(a) for a in lowered[1] if a.kind is Kind.RECEIVE_FORWARD]
    assert received == ["1RECV_F0<0", "3RECV_F0<0", "1RECV_F1<0", "3RECV_F1<0", "3RECV_F0<2", "3RECV_F1<2"]


@given(meshes())
def test_every_link_between_ranks_has_its_messages(mesh: tuple[Schedule, Mesh, Links]) -> None:
    """Gradients are awaited once their values are sent."""
    schedule, mesh, links = mesh
    lowered = add_communication(schedule, mesh, links)
    got = sorted(str(a) for actions in lowered.values() for a in actions if a.kind in PER_PEER)
    expected = []
    for action in (action for actions in schedule.values() for action in actions):
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
    for actions in lowered.values():
        for n, receive in enumerate(actions):
            if receive.kind is Kind.RECEIVE_BACKWARD:
                assert replace(receive, kind=Kind.SEND_FORWARD) in actions[:n]


@given(meshes())
def test_channels_are_first_in_first_out(mesh: tuple[Schedule, Mesh, Links]) -> None:
    schedule, mesh, links = mesh
    sent, received = defaultdict(list), defaultdict(list)
    for rank, actions in add_communication(schedule, mesh, links).items():
        for action in actions:
            if action.kind in PER_PEER:
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
def test_compute_actions_stay_and_no_rank_gets_stuck_where_each_waits_for_its_device(
    mesh: tuple[Schedule, Mesh, Links], recompute: bool
) -> None:
    """A device has come to its end once the messages and sums before are over, as those of NCCL are kernels."""
    schedule, mesh, links = mesh
    lowered = lower(schedule, mesh, links, recompute=recompute)
    assert not device_stops(lowered, mesh, links), texts(lowered)
    added = PER_PEER | {Kind.REDUCE, Kind.RECOMPUTE}
    assert {rank: [a for a in actions if a.kind not in added] for rank, actions in lowered.items()} == schedule
    for rank, actions in add_recompute(schedule).items():
        for before, action in zip(schedule[rank], schedule[rank][1:], strict=False):
            if action.kind in BEGINS_BACKWARD:
                again = replace(action, kind=Kind.RECOMPUTE)
                if before == replace(action, kind=Kind.FORWARD):
                    assert again not in actions
                else:
                    assert actions[actions.index(action) - 1] == again


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


@given(meshes(), st.sampled_from([0.0, 0.5, 3.0, 9.0]), st.booleans())
def test_out_after_forward_and_back_before_what_needs_it(
    mesh: tuple[Schedule, Mesh, Links], copy_s: float, recompute: bool
) -> None:
    schedule, mesh, links = mesh
    own = costs(copy_s)[:1] * mesh.stages
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
