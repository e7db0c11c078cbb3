"""Groups of ranks that predict over stages: who connects to whom."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from pathlib import Path

import pytest
import torch

from app.prediction import share
from app.prediction.command import PredictCommand
from parallel.schedule.mesh import Mesh

Pair = tuple[int, int]


class Recording:
    """Records in which order a rank connects and makes groups."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world = rank, world
        self.calls: list[tuple[str, list[int] | set[Pair]]] = []

    def connect(self, pairs: Collection[Pair]) -> None:
        self.calls.append(("connect", set(pairs)))

    def subgroup(self, ranks: Sequence[int]) -> Recording | None:
        self.calls.append(("subgroup", list(ranks)))
        return Recording(list(ranks).index(self.rank), len(ranks)) if self.rank in ranks else None


@pytest.mark.parametrize(("world", "stages"), [(4, 2), (6, 3)])
def test_all_ranks_make_the_links_of_all_groups(world: int, stages: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups that made links by themselves would hand each other's ranks their tiles."""
    every_skip = dict.fromkeys(itertools.combinations(range(stages), 2), True)
    needed = set(Mesh(world // stages, tuple(range(stages))).pairs(every_skip))
    calls = []
    for rank in range(world):
        whole = Recording(rank, world)
        monkeypatch.setattr(share, "connect", lambda *_, whole=whole: whole)
        command = PredictCommand(Path("slides"), Path("best.pt"), ranks=world, stages=stages)
        group = share._spread(command, rank, torch.device("cpu")).communicator
        assert (group.rank, group.world) == (rank % stages, stages)
        calls.append(whole.calls)
    assert calls[0][0] == ("connect", needed)
    assert [name for name, _ in calls[0][1:]] == ["subgroup"] * (world // stages)
    assert all(own == calls[0] for own in calls)
