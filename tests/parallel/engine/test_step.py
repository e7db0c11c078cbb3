"""A step's microbatches, the ranks that sum its gradients, and its measured timeline."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from parallel.comm.communicator import Communicator
from parallel.comm.thread_comm import run_on_threads
from parallel.engine.rank_program import StageGroups
from parallel.engine.recorded import gather_timeline, measured_costs
from parallel.engine.step import Microbatch, StepBatches
from parallel.schedule.action import Action, Kind
from parallel.schedule.mesh import Mesh
from parallel.schedule.passes import lower
from parallel.schedule.registry import build_schedule
from parallel.schedule.simulate import simulate
from parallel.schedule.timeline import LinkCost, Span, StageCost


class Source:
    def __init__(self, images: bool = True, targets: bool = True) -> None:
        self.drawn = 0
        self._has_images, self._has_targets = images, targets

    def __iter__(self) -> Iterator[Microbatch]:
        while True:
            self.drawn += 1
            yield self._microbatch()  # not held by a variable here

    def _microbatch(self) -> Microbatch:
        shape = (self.drawn, 3, 4, 4)
        images = torch.full(shape, float(self.drawn)) if self._has_images else None
        return Microbatch(images, torch.tensor([self.drawn]) if self._has_targets else None, shape)


def test_microbatches_are_drawn_as_far_as_is_asked_for_and_handed_out_in_any_order() -> None:
    source = Source()
    feed = StepBatches(source, range(3, 6))
    assert source.drawn == 0
    assert feed.shape(4) == (2, 3, 4, 4)
    assert source.drawn == 2
    assert feed.shape(5) == (3, 3, 4, 4)
    assert [feed.images(i).unique().tolist() for i in (5, 3, 4)] == [[3.0], [1.0], [2.0]]
    assert [feed.targets(i).item() for i in (4, 5, 3)] == [2, 3, 1]
    assert source.drawn == 3


def test_images_that_were_handed_out_are_not_held() -> None:
    feed = StepBatches(Source(), range(2))
    feed.shape(0)
    reference = weakref.ref(feed.images(0))
    gc.collect()
    assert reference() is None
    assert feed.shape(0) == (1, 3, 4, 4), "messages of later stages still ask for it"


def test_images_of_another_shape_than_announced_are_refused() -> None:
    feed = StepBatches([Microbatch(torch.zeros(2, 3, 4, 8), None, (2, 3, 8, 4))], range(1))
    feed.shape(0)
    with pytest.raises(
        ValueError, match=r"microbatch 0 was announced as \(2, 3, 8, 4\) and holds images \(2, 3, 4, 8\)"
    ):
        feed.images(0)


@pytest.mark.parametrize("missing", ["images", "targets"])
def test_asking_for_what_this_rank_did_not_want_is_our_fault(missing: str) -> None:
    feed = StepBatches(Source(images=missing != "images", targets=missing != "targets"), range(1))
    feed.shape(0)
    with pytest.raises(AssertionError, match=f"this rank wants the {missing}"):
        getattr(feed, missing)(0)


def sums(mesh: Mesh) -> list[dict[int, float]]:
    """Of each rank: the sum of 2 ** rank over those it shares a stage with, by stage."""

    def rank(communicator: Communicator, _: Any) -> dict[int, float]:
        found: dict[int, float] = {}
        for stage, ranks in sorted(StageGroups(communicator, mesh).of_stage.items()):
            number = torch.tensor([2.0**communicator.rank])
            ranks.all_reduce(number)
            found[stage] = number.item()
        return found

    return run_on_threads(mesh.teams, rank, timeout_s=20)


@pytest.mark.parametrize(
    "mesh",
    [Mesh(1, (0, 1, 2)), Mesh(2, (0, 1, 0, 1)), Mesh(1, (0, 1, 2), 2), Mesh(1, (0, 1, 2, 3), 2), Mesh(2, (0, 1, 2), 2)],
    ids=str,
)
def test_every_rank_meets_all_copies_of_its_stages(mesh: Mesh) -> None:
    for rank, found in enumerate(sums(mesh)):
        expected = {stage: sum(2.0**r for r in mesh.teams_with(stage)) for stage, _ in mesh.held_by(rank)}
        assert found == expected


def test_the_same_ranks_share_one_communicator() -> None:
    """Each subgroup costs a communicator of the backend, and all ranks take part in making it."""

    class Counting:
        def __init__(self, inner: Communicator) -> None:
            self.inner, self.rank, self.made = inner, inner.rank, 0

        def subgroup(self, ranks: tuple[int, ...]) -> Communicator | None:
            self.made += 1
            return self.inner.subgroup(ranks)

    def rank(communicator: Communicator, _: Any) -> tuple[int, int]:
        counting: Any = Counting(communicator)
        holders = StageGroups(counting, Mesh(1, (0, 1, 2, 3), 2))
        return counting.made, len({id(each) for each in holders.of_stage.values()})

    assert run_on_threads(4, rank, timeout_s=20) == [(2, 1)] * 4


COSTS = [StageCost(1.0, 2.0, 1.25, 0.75, 0), StageCost(3.0, 4.0, 2.5, 1.5, 0), StageCost(0.5, 1.0, 0.5, 0.5, 0)]
LINKS = {(0, 1): True, (1, 2): True, (0, 2): True}


def test_every_rank_s_spans_come_together_from_the_first_action_on() -> None:
    def tell(communicator: Communicator, _: Any) -> Any:
        begun = 100.0 + communicator.rank
        spans = [Span(Action(Kind.FORWARD, communicator.rank, 0), begun, begun + 0.5)]
        return gather_timeline(communicator, spans, peak_bytes=communicator.rank + 7)

    first, *others = run_on_threads(3, tell, timeout_s=30)
    assert others == [None, None]
    assert [first.spans[rank][0].start_s for rank in range(3)] == [0.0, 1.0, 2.0]
    assert str(first.spans[2][0].action) == "2F0"
    assert first.peak_bytes == {0: 7, 1: 8, 2: 9}


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zero-bubble", "master"])
def test_the_costs_of_a_step_simulate_to_the_same_step(name: str) -> None:
    mesh = Mesh(1, (0, 1, 2), 2 if name == "master" else 1)
    schedule = lower(build_schedule(name, mesh, 5), mesh, LINKS)
    step = simulate(schedule, mesh, COSTS, dict.fromkeys(LINKS, LinkCost(0.0, 0.0)))
    again = simulate(schedule, mesh, measured_costs(step, 3))
    assert again.makespan_s == pytest.approx(step.makespan_s)
