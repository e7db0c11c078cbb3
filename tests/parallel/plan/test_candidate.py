"""What a planner chooses from: every candidate can run, and none that could is missing."""

from __future__ import annotations

import pytest

from parallel.memory.policy import ActivationPolicy
from parallel.plan.candidates import candidates
from parallel.plan.step_time import schedule_of, weights_of
from parallel.schedule.registry import SCHEDULES
from parallel.strategy import WHOLE, Strategy

NAMES = (*WHOLE, *SCHEDULES)


def found(ranks: int, batch: int, **more: int | None) -> set[tuple[str, int, int]]:
    return {(c.name, c.depth, c.m) for c in candidates(ranks, batch, names=NAMES, most_stages=100, **more)}


def test_one_rank_trains_alone() -> None:
    assert found(1, 8) == {("single", 1, m) for m in (1, 2, 4, 8)}


def test_two_ranks() -> None:
    two = found(2, 4)
    assert ("single", 1, 4) not in two
    assert {m for name, _, m in two if name == "ddp"} == {2, 4}
    assert {m for name, _, m in two if name == "mast"} == {2}
    assert {m for name, _, m in two if name == "1f1b"} == {1, 2, 4}
    assert {name for name, _, _ in two} == set(NAMES) - {"single"}


@pytest.mark.parametrize(("ranks", "batch"), [(2, 3), (6, 8), (8, 8), (12, 30), (64, 64)])
def test_every_candidate_can_run(ranks: int, batch: int) -> None:
    for candidate in candidates(ranks, batch, names=tuple(SCHEDULES), most_stages=30):
        assert candidate.groups * candidate.depth == ranks
        assert candidate.stages <= 30
        schedule, mesh = schedule_of(candidate)
        assert set(schedule) == set(range(candidate.depth))
        assert mesh.stages == candidate.stages
        numbers = {action.microbatch for actions in schedule.values() for action in actions}
        assert numbers == set(range(len(weights_of(candidate, batch))))


def test_more_ranks_than_tiles_leave_only_deep_splits() -> None:
    assert {depth for _, depth, _ in found(8, 2)} == {4, 8}
    assert "ddp" not in {name for name, _, _ in found(8, 2)}


def test_what_the_user_fixes_is_kept() -> None:
    assert {(depth, m) for _, depth, m in found(8, 16, depth=4, m=8)} == {(4, 8)}
    assert {name for name, _, _ in found(8, 16, depth=4)} == set(SCHEDULES)


def test_uneven_microbatches_weigh_what_they_hold() -> None:
    (candidate,) = [c for c in candidates(2, 5, names=["1f1b"], most_stages=9) if c.m == 3]
    assert weights_of(candidate, 5) == (1.0, 1.0, 0.5)


def test_texts() -> None:
    assert str(Strategy("ddp", 4, 1, 8)) == "ddp 4, m=8"
    assert (
        str(Strategy("single", 1, 1, 2).under(recompute="block", offload="overlap"))
        == "single, m=2 +recompute block +offload"
    )
    master = Strategy("master", 8, 4, 16, zero=1).under(recompute="stage")
    assert str(master) == "master 2 x 4, m=16 +recompute +zero 1"


def test_what_is_kept() -> None:
    runs = (("layer1", "layer2"),)
    plain = Strategy("1f1b", 2, 2, 4)
    assert plain.policy == ActivationPolicy()
    assert not plain.policy.saves
    assert plain.under(recompute="optimal", chosen=runs).policy == ActivationPolicy("optimal", runs)
    assert not plain.under(recompute="optimal").policy.segmented
    assert plain.under(offload="overlap").policy.saves
    assert plain.under(recompute="stage").policy.stagewise
