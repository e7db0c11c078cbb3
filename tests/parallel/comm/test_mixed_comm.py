"""Ranks on CPUs and GPUs sum in two ways: the contract of communicators, bits, gradients, and neighbours that are lost.

The ranks are on CPUs all of them; the tables say otherwise, and which machine each is on.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from parallel.comm import mixed_comm
from parallel.comm.communicator import CommunicationError, Communicator
from parallel.comm.kinds import RankKind, by_node
from parallel.comm.mixed_comm import MixedCommunicator, Way
from parallel.comm.thread_comm import run_on_threads
from parallel.strategy import Strategy
from tests.contracts.communicator_contract import check_communicator
from tests.helpers.engine_runs import assert_equal, plain_of, run
from tests.helpers.plain_step import TOLERANCE
from tests.helpers.ranks import run_on_ranks
from tests.helpers.small_nets import batch_of

HERE = "tests.parallel.comm.test_mixed_comm"
Launcher = Literal["forked", "mpi", "threads"]


def table(text: str) -> list[RankKind]:
    """Of ``a0 a1 ac b0 bc``: the machine, then the number of the GPU or c for a CPU."""
    return [RankKind(word[0], "cpu") if word[1] == "c" else RankKind(word[0], "cuda", word[1]) for word in text.split()]


TABLES: dict[Way, tuple[str, ...]] = {
    "host": ("a0 ac", "a0 a1 ac", "a0 ac b0 bc", "a0 ac ac b0"),
    "device": ("a0 ac", "a0 ac ac", "a0 ac bc b0", "a0 a1 ac bc b0"),
}
CASES = [(way, text) for way, texts in TABLES.items() for text in texts]


def contract(communicator: Communicator, argument: Any) -> dict[str, Any]:
    kinds = table(argument["kinds"])
    mixed = MixedCommunicator(communicator, kinds, argument["way"])
    with pytest.raises(ValueError, match=r"not as a group of ranks \[0, .*\]: --device mixed is for --parallel ddp"):
        mixed.subgroup(range(mixed.world))
    for kind in ("cpu", "cuda"):
        alike = [rank for rank, each in enumerate(kinds) if each.kind == kind]
        part = mixed.subgroup(alike)
        assert (part is not None) == (mixed.rank in alike)
        if part is not None:
            tensor = torch.tensor([float(mixed.rank)])
            part.all_reduce(tensor)
            assert tensor.item() == sum(alike)
    return check_communicator(mixed, groups=False)


@pytest.mark.parametrize(
    ("launcher", "way", "kinds"),
    [
        *(pytest.param("threads", *case, marks=pytest.mark.long) for case in CASES),
        *(
            pytest.param(*case, marks=pytest.mark.process)
            for case in (
                ("forked", "host", "a0 ac b0 bc"),
                ("forked", "device", "a0 ac bc b0"),
                ("mpi", "host", "a0 ac ac"),
                ("mpi", "device", "a0 a1 ac"),
            )
        ),
    ],
)
def test_both_ways_keep_the_contract(launcher: Launcher, way: Way, kinds: str, tmp_path: Path) -> None:
    world = len(kinds.split())
    results = run_on_ranks(world, f"{HERE}:contract", tmp_path, {"kinds": kinds, "way": way}, launcher=launcher)
    assert [(result["rank"], result["world"]) for result in results] == [(rank, world) for rank in range(world)]
    assert all(result["bits"] == results[0]["bits"] for result in results)


def tensor_of(rank: int, size: int, dtype: torch.dtype) -> Tensor:
    """Numbers whose sum depends on the order."""
    generator = torch.Generator().manual_seed(rank)
    drawn = torch.randn(size, generator=generator, dtype=dtype)
    return drawn * 1000.0 ** torch.randn(size, generator=generator, dtype=dtype)


@pytest.mark.parametrize("size", [1, 5, 700_003])
@pytest.mark.parametrize(("way", "kinds"), CASES)
def test_bits_are_those_of_additions_in_order(way: Way, kinds: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixed_comm, "PART_BYTES", 1 << 20)  # the longest takes three parts
    ranks = table(kinds)

    def summed(inner: Communicator, _: Any) -> Tensor:
        communicator, tensor = MixedCommunicator(inner, ranks, way), tensor_of(inner.rank, size, torch.float32)
        communicator.all_reduce(tensor)
        communicator.close()
        return tensor

    found = run_on_threads(len(ranks), summed)
    assert all(torch.equal(found[0], each) for each in found)
    teams: Sequence[Sequence[int]] = by_node(ranks) if way == "host" else mixed_comm.crews_of(ranks)
    parts = [in_order([tensor_of(rank, size, torch.float32) for rank in team]) for team in teams]
    assert torch.equal(found[0], in_order(parts))


def in_order(tensors: Sequence[Tensor]) -> Tensor:
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        total += tensor
    return total


SHARES = {2: ((0, 1, 2), (3,)), 4: ((0, 1, 2), (3,), (4, 5, 6), (7,))}
"""3 and 1 on each machine."""


def strategy_of(world: int) -> tuple[Strategy, list[list[int]]]:
    """And the tiles of its microbatches, in two steps."""
    m = sum(map(len, SHARES[world]))
    return Strategy("ddp", world, 1, m, gradient_bytes=100, shares=SHARES[world]), [[3, 2, 1, 1, 1, 1, 1, 1][:m]] * 2


def trained(communicator: Communicator, argument: Any) -> dict[str, Any]:
    mixed = MixedCommunicator(communicator, table(argument["kinds"]), argument["way"])
    strategy, sizes = strategy_of(mixed.world)
    return {
        str(dtype): run(mixed, "skips", strategy, [batch_of(each, 12, k, dtype) for k, each in enumerate(sizes)])
        for dtype in TOLERANCE
    }


@pytest.mark.parametrize("way", ["host", "device"])
@pytest.mark.parametrize(
    ("launcher", "kinds"),
    [
        ("threads", "a0 ac"),
        ("threads", "a0 ac b0 bc"),
        pytest.param("forked", "a0 ac b0 bc", marks=pytest.mark.process),
        pytest.param("mpi", "a0 ac", marks=pytest.mark.process),
    ],
)
def test_gradients_are_those_of_the_plain_step(launcher: Launcher, kinds: str, way: Way, tmp_path: Path) -> None:
    world = len(kinds.split())
    ranks = run_on_ranks(world, f"{HERE}:trained", tmp_path, {"kinds": kinds, "way": way}, launcher=launcher)
    for dtype in TOLERANCE:
        steps = [batch_of(each, 12, k, dtype) for k, each in enumerate(strategy_of(world)[1])]
        assert_equal([rank[str(dtype)] for rank in ranks], plain_of("skips", steps), dtype)


def test_a_machine_without_a_gpu_rank_cannot_sum_on_gpus() -> None:
    with pytest.raises(ValueError, match=r"the machine of ranks \[2, 3\] has no rank on one: .*mixed-sums=host"):
        run_on_threads(4, lambda inner, _: MixedCommunicator(inner, table("a0 ac bc bc"), "device"))


def test_ranks_of_other_containers_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    maker, opened = threading.Lock(), os.open
    unlike = os.memfd_create("not the segment")
    os.ftruncate(unlike, 1 << 30)

    def elsewhere(path: str, flags: int) -> int:
        with maker:
            return opened(f"/proc/self/fd/{unlike}" if path.startswith("/proc/") else path, flags)

    monkeypatch.setattr("parallel.comm.mixed_comm.os.open", elsewhere)
    with pytest.raises(CommunicationError, match="do not share its memory"):
        run_on_threads(2, lambda inner, _: MixedCommunicator(inner, table("a0 ac"), "host"))
    os.close(unlike)


def lost(communicator: Communicator, argument: Any) -> dict[str, Any]:
    """The last rank ends, or sleeps, in place of a second sum; what the others say, and when."""
    mixed = MixedCommunicator(communicator, table(argument["kinds"]), argument["way"])
    mixed.all_reduce(torch.ones(3))
    if mixed.rank == mixed.world - 1:
        if argument["how"] == "dies":
            os._exit(0)
        time.sleep(argument["sleeps"])
    begun_s = time.monotonic()
    works = [mixed.iall_reduce(torch.ones(5)) for _ in range(2)]
    said = []
    for work in works:
        with pytest.raises(CommunicationError) as caught:
            work.wait()
        said.append(str(caught.value))
    # Files in place of what ``run_on_ranks`` hands back: these ranks do not close, as one of them is gone.
    torch.save({"said": said, "after_s": time.monotonic() - begun_s}, f"{argument['folder']}/{mixed.rank}.pt")
    os._exit(0)


@pytest.mark.process
@pytest.mark.parametrize(("way", "kinds", "how"), [("host", "a0 ac", "hangs"), ("device", "a0 ac b0 bc", "dies")])
def test_lost_neighbours_are_told(way: Way, kinds: str, how: str, tmp_path: Path) -> None:
    world, limit_s = len(kinds.split()), 2.0
    argument = {"kinds": kinds, "way": way, "how": how, "sleeps": 3 * limit_s, "folder": str(tmp_path / "said")}
    (tmp_path / "said").mkdir()
    with pytest.raises((AssertionError, FileNotFoundError)):  # the lost rank leaves no result
        run_on_ranks(world, f"{HERE}:lost", tmp_path / "ranks", argument, patience_s=limit_s)
    told = torch.load(tmp_path / "said" / "0.pt")
    for said in told["said"]:
        assert said.startswith(f"rank 0 of {world}: all_reduce of (5,) float32 by way of the {way}: rank 0 of 2: ")
        assert "another rank has ended or hangs: its own message says why" in said
    assert told["after_s"] < 3 * limit_s


def test_a_sum_fails_for_all_that_wait_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: object, flat: Tensor) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(mixed_comm.SharedSums, "add", broken)

    def summed(inner: Communicator, _: Any) -> list[str]:
        communicator, said = MixedCommunicator(inner, table("a0 ac"), "host"), []
        for work in [communicator.iall_reduce(torch.ones(2)) for _ in range(3)]:
            with pytest.raises(RuntimeError) as caught:
                work.wait()
            said.append(str(caught.value))
        return said

    assert run_on_threads(2, summed) == [["no memory"] * 3] * 2
