"""Schedules by name, over data-parallel groups, and what a user is told who asks for what cannot be."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel.schedule.action import Kind
from parallel.schedule.registry import SCHEDULES, build_schedule, default_microbatches, mesh_for
from parallel.schedule.shares import share_of
from tests.golden.regenerate import SCHEDULE_FILES, schedules
from tests.helpers.schedules import small_mesh


def test_names() -> None:
    assert list(SCHEDULES) == [
        "mp-basic", "gpipe", "1f1b", "interleaved", "zero-bubble", "mast", "master", "bidirectional",
    ]  # fmt: skip
    assert all(kind.name == name for name, kind in SCHEDULES.items())


@given(
    name=st.sampled_from(sorted(set(SCHEDULES) - {"mast"})),
    groups=st.integers(min_value=1, max_value=3),
    depth=st.integers(min_value=2, max_value=4),
    m=st.integers(min_value=3, max_value=12),
)
def test_each_group_computes_its_share(name: str, groups: int, depth: int, m: int) -> None:
    mesh = small_mesh(name, groups, depth)
    schedule = build_schedule(name, mesh, m)
    assert sorted(schedule) == list(range(groups * depth))
    for rank, actions in schedule.items():
        share = share_of(rank // mesh.depth, groups, m)
        assert {action.microbatch for action in actions} == set(share)


@pytest.mark.parametrize("name", SCHEDULES)
def test_kind_says_what_its_schedule_is(name: str) -> None:
    kind = SCHEDULES[name]
    mesh = small_mesh(name)
    assert mesh.replicas == kind.replicas
    actions = build_schedule(name, mesh, 2)[0]
    assert {action.kind for action in actions} == {Kind.FORWARD} | (
        {Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT} if name == "zero-bubble" else {Kind.BACKWARD}
    )
    assert {action.replica for action in actions} == set(range(kind.replicas))


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("depth", [2, 3, 4])
def test_default_microbatches_can_be_run(name: str, depth: int) -> None:
    mesh = small_mesh(name, depth=depth)
    assert build_schedule(name, mesh, default_microbatches(name, depth))


def test_default_microbatches() -> None:
    assert [default_microbatches(name, 3) for name in SCHEDULES] == [1, 6, 6, 6, 6, 2, 6, 6]


def test_unknown_name_lists_the_names() -> None:
    for call in (
        lambda: default_microbatches("gpip", 2),
        lambda: mesh_for("gpip", groups=1, depth=2, chunks=1),
        lambda: build_schedule("gpip", mesh_for("gpipe", groups=1, depth=2, chunks=1), 2),
    ):
        with pytest.raises(ValueError, match=r"no schedule 'gpip'.*mp-basic, gpipe, 1f1b.*bidirectional"):
            call()


@pytest.mark.parametrize(
    ("name", "mesh", "message"),
    [
        ("master", (1, 1, 1), r"master inverts its second replica, which takes at least 2 ranks a group, not 1"),
        ("interleaved", (1, 2, 1), r"2 or more stages a rank, not 1: ask for 4 stages on 2 ranks, or use 1f1b"),
        ("gpipe", (1, 2, 3), r"one stage a rank, not 3: ask for 2 stages, or use interleaved"),
        ("gpipe", (0, 2, 1), r"at least one group of at least one rank, not 0 x 2"),
        ("gpipe", (1, 0, 1), r"at least one group of at least one rank, not 1 x 0"),
        ("mast", (1, 1, 2), r"at least 2 ranks.*; .*one stage a rank"),
    ],
)
def test_mesh_that_cannot_be(name: str, mesh: tuple[int, int, int], message: str) -> None:
    groups, depth, chunks = mesh
    with pytest.raises(ValueError, match=message):
        mesh_for(name, groups=groups, depth=depth, chunks=chunks)


@pytest.mark.parametrize(
    ("name", "m", "message"),
    [
        ("mast", 3, r"2 microbatches a group, 4 in 2 groups, not 3: set --microbatches 4, or use master"),
        ("master", 1, r"1 microbatches cannot keep 2 data-parallel groups busy: raise --microbatches to 2"),
        ("1f1b", 0, r"0 microbatches cannot keep"),
    ],
)
def test_microbatches_that_cannot_be(name: str, m: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_schedule(name, mesh_for(name, groups=2, depth=2, chunks=1), m)


def test_golden_schedules_are_todays() -> None:
    kept = {path.name: path.read_text() for path in SCHEDULE_FILES.glob("*.csv")}
    assert schedules() == kept, "a schedule changed: run `make golden` and look at the diff"
