"""Microbatches are drawn as far as is needed and no further, and held no longer than they are used."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest
import torch

from parallel.engine.step import Microbatch, StepBatches


class Source:
    """Microbatches of 1, 2, 3, ... tiles; notes how many were drawn."""

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


def test_draws_up_to_what_is_asked_for() -> None:
    source = Source()
    feed = StepBatches(source, range(4))
    assert source.drawn == 0
    assert feed.shape(1) == (2, 3, 4, 4)
    assert source.drawn == 2
    feed.images(0), feed.targets(1), feed.shape(0)
    assert source.drawn == 2


def test_numbers_are_those_of_the_share() -> None:
    feed = StepBatches(Source(), range(3, 6))
    assert feed.shape(5) == (3, 3, 4, 4)
    assert feed.images(4).unique().tolist() == [2.0]
    assert feed.targets(3).tolist() == [1]


def test_images_and_targets_in_any_order() -> None:
    feed = StepBatches(Source(), range(3))
    feed.shape(2)
    assert [feed.images(i).shape[0] for i in (2, 0, 1)] == [3, 1, 2]
    assert [feed.targets(i).item() for i in (1, 2, 0)] == [2, 3, 1]


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
