"""Ranks say what they compute on before they form groups: the table, and backends that follow."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from parallel.comm import torch_comm
from parallel.comm.kinds import RankKind, are_mixed, from_text, has_gpu_each, own_kind, to_text
from parallel.comm.torch_comm import TorchCommunicator, backend_of
from tests.helpers.forked import run_ranks

BOTH = "cpu:gloo,cuda:nccl"
CPU, GPU, NEXT = RankKind("a", "cpu"), RankKind("a", "cuda", "GPU-0"), RankKind("a", "cuda", "GPU-1")


@pytest.mark.parametrize(
    ("kinds", "backend"),
    [
        ([CPU, CPU], "gloo"),
        ([GPU, NEXT], BOTH),
        ([GPU, GPU], "gloo"),
        ([GPU, RankKind("b", "cuda", "GPU-0")], BOTH),
        ([GPU, CPU], "gloo"),
        ([GPU], BOTH),
    ],
)
def test_nccl_is_for_ranks_with_a_gpu_each(kinds: list[RankKind], backend: str) -> None:
    assert backend_of(kinds) == backend
    assert has_gpu_each(kinds) == (backend == BOTH)
    assert are_mixed(kinds) == ({CPU, GPU} <= set(kinds))
    assert from_text(to_text(kinds)) == tuple(kinds)


def test_a_rank_on_a_cpu_names_its_machine() -> None:
    own = own_kind(torch.device("cpu"))
    assert (own.kind, own.unit) == ("cpu", "")
    assert own.node
    assert own == own_kind(torch.device("cpu"))


def joined(folder: str) -> None:
    """A rank that says it is on a GPU where its number is even."""
    import os

    rank = int(os.environ["RANK"])
    own = CPU if rank % 2 else RankKind("a", "cuda", f"GPU-{rank}")
    communicator = TorchCommunicator(torch.device("cpu"), 30, 30, own)
    tensor = torch.tensor([float(rank)])
    communicator.all_reduce(tensor)
    Path(folder, f"{rank}.txt").write_text(f"{to_text(communicator.kinds)} {tensor.item():g}")
    communicator.close()


@pytest.mark.process
def test_ranks_of_two_kinds_join_without_waiting_for_groups_that_others_do_not_make(tmp_path: Path) -> None:
    codes, printed = run_ranks(3, "tests.parallel.comm.test_kinds:joined", [str(tmp_path)], tmp_path, 60)
    assert codes == [0, 0, 0], printed
    told = [(tmp_path / f"{rank}.txt").read_text() for rank in range(3)]
    assert told == [f"{to_text([GPU, CPU, RankKind('a', 'cuda', 'GPU-2')])} 3"] * 3


class Groups:
    """In place of torch.distributed: keeps which groups were asked for."""

    def __init__(self) -> None:
        self.made: list[tuple[tuple[int, ...], str | None]] = []

    def new_group(
        self, ranks: Sequence[int], timeout: timedelta, backend: str | None, use_local_synchronization: bool
    ) -> object:
        assert timeout == timedelta(seconds=60)
        assert not use_local_synchronization
        self.made.append((tuple(ranks), backend))
        return object()


@pytest.mark.parametrize("rank", range(3))
@pytest.mark.parametrize(
    ("kinds", "backends"), [((GPU, NEXT, CPU), [BOTH, "gloo", "gloo"]), ((CPU, CPU, CPU), [None, None, None])]
)
def test_every_rank_asks_for_the_same_groups(
    rank: int, kinds: tuple[RankKind, ...], backends: list[str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = Groups()
    monkeypatch.setattr(torch_comm, "dist", fake)
    monkeypatch.setattr(torch_comm, "join_group", lambda *_: kinds)
    for name, value in {"RANK": rank, "WORLD_SIZE": 3, "LOCAL_RANK": rank}.items():
        monkeypatch.setenv(name, str(value))
    communicator = TorchCommunicator(torch.device("cpu"), 60, 60, kinds[rank])
    asked: Any = [(0, 1), (0, 2), (2,)]
    made = [communicator.subgroup(ranks) for ranks in asked]
    assert fake.made == list(zip(asked, backends, strict=True))
    for ranks, part in zip(asked, made, strict=True):
        assert (part is None) == (rank not in ranks)
        assert not isinstance(part, TorchCommunicator) or part.kinds == tuple(kinds[each] for each in ranks)
