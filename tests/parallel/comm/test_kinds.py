"""Ranks say what they compute on before they form groups: the table, and backends that follow."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

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
