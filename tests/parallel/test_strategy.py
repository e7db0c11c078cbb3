"""What follows from names and numbers before any rank computes: mesh, stages, proven schedule, or reasons why not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from parallel.graph.layers import INPUT, OUTPUT, RANDOM_STATE, Layer, LayerGraph
from parallel.schedule.action import Kind
from parallel.schedule.registry import SCHEDULES
from parallel.strategy import Strategy

COMPUTED = (Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)


def chain(count: int, skip: tuple[int, int] | None = None) -> LayerGraph:
    """``count`` modules in a row, m1 and so on, all as dear; the second of ``skip`` uses the first's value too."""
    names = ["x", *(f"m{k}" for k in range(1, count + 1)), "out"]
    layers = []
    for k, name in enumerate(names):
        inputs = (names[k - 1],) if k else ()
        if skip and k == skip[1]:
            inputs = (*inputs, names[skip[0]])
        kind = INPUT if k == 0 else OUTPUT if k == len(names) - 1 else "Conv2d"
        layers.append(Layer(name, kind, inputs, module=name, flops=100 if kind == "Conv2d" else 0, scope=name))
    return LayerGraph(tuple(layers))


def strategy(name: str, groups: int = 1, depth: int = 3, **more: object) -> Strategy:
    m = 2 * groups if name == "mast" else 5 * groups
    chunks = 2 if SCHEDULES[name].chunks else 1
    return replace(Strategy(name, groups * depth, depth, m, chunks=chunks), **more)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_computes_each_microbatch_of_each_stage_once(name: str, groups: int) -> None:
    chosen = strategy(name, groups)
    mesh = chosen.mesh
    partition = chosen.partition(chain(12, skip=(1, 11)))
    assert partition.depth == mesh.stages == 3 * chosen.chunks
    assert all(edge.value != RANDOM_STATE for edge in partition.edges)
    schedule = chosen.schedule(partition.links)
    sent = {(a.stage, a.peer) for actions in schedule.values() for a in actions if a.kind is Kind.SEND_FORWARD}
    assert sent == {link for link in partition.links if len({*map(mesh.team_at, link)}) == 2}
    assert sorted(schedule) == list(range(3 * groups))
    forwards = [(a.stage, a.microbatch) for actions in schedule.values() for a in actions if a.kind is Kind.FORWARD]
    assert sorted(forwards) == [(stage, i) for stage in range(mesh.stages) for i in range(chosen.m)]


def test_stages_are_equal_unless_cuts_are_named() -> None:
    graph = chain(9)
    assert strategy("gpipe").partition(graph).starts == (0, 4, 7)
    assert strategy("gpipe", cuts=("m2", "m9")).partition(graph).starts == (0, 2, 9)


def test_a_schedule_file_takes_the_place_of_the_named_one() -> None:
    rows = "0F0,0F1,0B1,0B0\n1F0,1F1,1B1,1B0\n"
    chosen = Strategy("gpipe", 2, 2, 2, schedule_csv=rows)
    schedule = chosen.schedule({(0, 1): True})
    computed = [[str(a) for a in schedule[rank] if a.kind in COMPUTED] for rank in range(2)]
    assert computed == [["0F0", "0F1", "0B1", "0B0"], ["1F0", "1F1", "1B1", "1B0"]]


SPLIT = "0F0,0I0,0W0\n1F0,1B0\n"
SWAPPED = "0F1,0B1\n1F1,1B1\n0F0,0B0\n1F0,1B0\n"
UPDATES = "0F0,0B0,0U0\n1F0,1B0,1U0\n"
SPLIT_UPDATES = "0F0,0I0,0W0,0U0\n1F0,1B0,1U0\n"
REFUSED = [
    (Strategy("gpipe", 4, 3, 4), "4 ranks cannot be grouped by 3"),
    (Strategy("gpipe", 2, 0, 4), "2 ranks cannot be grouped by 0"),
    (Strategy("gpip", 2, 2, 4), "no schedule 'gpip'; the schedules are mp-basic, gpipe"),
    (Strategy("1f1b", 2, 2, 4, zero=1), "1f1b on 2 ranks with --zero 1: leave it out: each stage is on one rank"),
    (Strategy("zero-bubble", 2, 2, 4, compile=True), "compiled stages cannot"),
    (Strategy("interleaved", 2, 2, 4), "interleaved .* 2 or more stages a rank, not 1"),
    (Strategy("master", 2, 1, 4), "at least 2 ranks a group, not 1"),
    (Strategy("zero-bubble", 3, 2, 4, compile=True, zero=1), "3 ranks .*; zero-bubble on 3 .*; zero-bubble splits"),
    (Strategy("gpipe", 2, 2, 2, cuts=("m2", "m3")), "2 cuts make 3 stages and 2 are needed: name 1 layers or modules"),
    (Strategy("mast", 2, 2, 4), "mast computes 2 microbatches a group"),
    (Strategy("gpipe", 4, 2, 1), "1 microbatches cannot keep 2 data-parallel groups busy"),
    (Strategy("gpipe", 2, 2, 1, schedule_csv="0F0,0B0\n1B0,1F0\n"), "1B0"),
    (Strategy("gpipe", 2, 2, 2, schedule_csv="0F0,0B0\n1F0,1B0\n"), "computes 1 microbatches and the batch has 2"),
    (Strategy("1f1b", 2, 2, 1, schedule_csv=SPLIT, compile=True), "the schedule file splits .* compiled stages cannot"),
    (Strategy("gpipe", 4, 2, 2, schedule_csv=SWAPPED), "group 0 of the schedule file must compute the microbatches 0$"),
    (Strategy("1f1b", 2, 2, 1, schedule_csv=UPDATES), "updates, such as 2U0, with pipedream and with no other"),
    (Strategy("pipedream", 2, 2, 1, schedule_csv=UPDATES.replace(",0U0", "").replace(",1U0", "")), "pipedream"),
    (Strategy("pipedream", 2, 2, 1, schedule_csv=SPLIT_UPDATES), "pipedream cannot: give whole backward passes"),
]  # fmt: skip


@pytest.mark.parametrize(("chosen", "message"), REFUSED)
def test_what_cannot_be_is_refused_with_all_reasons(chosen: Strategy, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        chosen.schedule(chosen.partition(chain(9)).links)


def test_a_schedule_of_pipedream_has_updates() -> None:
    assert "0U0" in map(str, Strategy("pipedream", 2, 2, 1, schedule_csv=UPDATES).schedule({(0, 1): True})[0])
