"""Links between GPUs: how many groups a rank makes in a large world, whom it connects to and that this is never in a
circle, and, over Gloo in place of NCCL, that what is made carries messages."""

from __future__ import annotations

import collections
from collections.abc import Collection
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from app.launch.watchdog_process import WAITING_LONGER_S
from parallel.comm import torch_comm
from parallel.comm.kinds import RankKind
from parallel.comm.torch_comm import Links, TorchCommunicator
from parallel.schedule.mesh import Mesh
from tests.helpers.ranks import run_on_ranks

WORLD = 1024
LONG = {(stage, stage + 1): True for stage in range(WORLD - 1)}
SKIPPING = {**{(stage, stage + 1): True for stage in range(7)}, (0, 7): True, (1, 6): True, (2, 5): False}
"""A chain of eight stages with skips, one of which no gradient comes back along."""
Pair = tuple[int, int]


class FakeDistributed:
    """Counts the groups that a rank makes, and keeps the order in which it meets others."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.calls: list[tuple[int, ...]] = []
        self.met: list[Pair] = []
        self.dtypes: set[torch.dtype] = set()
        self.options: list[Any] = []
        self.subgroups: list[tuple[Pair, str | None]] = []
        self.ProcessGroupNCCL = SimpleNamespace(Options=lambda: SimpleNamespace(config=SimpleNamespace()))

    def new_group(
        self, ranks: Pair, timeout: timedelta, backend: str | None, pg_options: Any = None, **how: object
    ) -> Any:
        """The default backend's are the subgroups, of which torch counts the names apart."""
        if backend == "nccl":
            self.calls.append(tuple(ranks))
            self.options.append(pg_options)
            return len(self.calls) - 1
        self.subgroups.append((ranks, backend))
        assert (timeout.total_seconds() >= 60, how) == (True, {"use_local_synchronization": False})
        return ranks

    def isend(self, tensor: torch.Tensor, peer: int, group: int) -> FakeDistributed:
        return self._meet(tensor, (self.rank, peer), group)

    def irecv(self, tensor: torch.Tensor, peer: int, group: int) -> FakeDistributed:
        return self._meet(tensor, (peer, self.rank), group)

    def _meet(self, tensor: torch.Tensor, pair: Pair, group: int) -> FakeDistributed:
        assert group == (pair[0] < pair[1])
        self.dtypes.add(tensor.dtype)
        self.met.append(pair)
        return self

    def wait(self) -> None:
        """Nothing is under way."""


GPUS = tuple(RankKind(str(rank // 8), "cuda", str(rank % 8)) for rank in range(WORLD))
"""Eight a host."""


def joined(
    monkeypatch: pytest.MonkeyPatch, rank: int, kinds: tuple[RankKind, ...] = GPUS
) -> tuple[FakeDistributed, TorchCommunicator]:
    fake = FakeDistributed(rank)
    monkeypatch.setattr(torch_comm, "dist", fake)
    monkeypatch.setattr(torch_comm, "join_group", lambda *_: kinds)
    for name, value in {"RANK": rank, "WORLD_SIZE": len(kinds), "LOCAL_RANK": rank % 8, "LOCAL_WORLD_SIZE": 8}.items():
        monkeypatch.setenv(name, str(value))
    return fake, TorchCommunicator(torch.device("cuda", rank % 8), 60, 60, kinds[rank])


def connected(monkeypatch: pytest.MonkeyPatch, rank: int, pairs: Collection[Pair]) -> FakeDistributed:
    fake, communicator = joined(monkeypatch, rank)
    with FakeTensorMode():
        communicator.connect(pairs)
        first = len(fake.calls), len(fake.met)
        communicator.connect(pairs)  # another engine of the same run
    assert (len(fake.calls), len(fake.met)) == first
    return fake


@pytest.mark.parametrize(
    ("mesh", "links", "own"),
    [
        (Mesh(1, tuple(range(WORLD))), LONG, 4),
        (Mesh(128, (0, 1, 2, 3, 4, 5, 6, 7)), SKIPPING, 6),
        (Mesh(128, (0, 1, 2, 3, 4, 5, 6, 7), replicas=2), SKIPPING, 6),
        (Mesh(128, tuple(range(8)) * 2), {(stage, stage + 1): True for stage in range(15)}, 4),
        (Mesh(WORLD, (0,)), {}, 0),
    ],
    ids=["one pipeline", "128 pipelines", "and their inverses", "two chunks a rank", "no pipeline"],
)
def test_a_rank_of_1024_makes_two_groups_and_connects_within_its_pipeline(
    mesh: Mesh, links: dict[Pair, bool], own: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A group for each pair of a pipeline of 1,024 stages would be 2,046."""
    pairs = mesh.pairs(links)
    for rank in (0, 1, 514, WORLD - 1):
        fake = connected(monkeypatch, rank, pairs)
        assert fake.calls == [tuple(range(WORLD))] * (2 if links else 0)
        # In one order on all ranks, whatever order they were told of.
        assert fake.met == sorted(pair for pair in pairs if rank in pair)
        assert len(fake.met) <= own
        assert {peer // mesh.depth for pair in fake.met for peer in pair} <= {rank // mesh.depth}


def test_ranks_that_wait_for_each_other_never_do_so_in_a_circle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is held at its next link until the other end comes there, too."""
    pairs = Mesh(128, (0, 1, 2, 3, 4, 5, 6, 7), replicas=2).pairs(SKIPPING)
    shuffled = [pairs[n * 997 % len(pairs)] for n in range(len(pairs))]
    left = {
        rank: collections.deque(connected(monkeypatch, rank, pairs if rank % 2 else shuffled).met)
        for rank in range(64)  # eight pipelines, closed in themselves
    }
    meetings = 0
    while any(left.values()):
        ready = {queue[0] for queue in left.values() if queue}
        met = [pair for pair in ready if all(left[rank] and left[rank][0] == pair for rank in pair)]
        assert met, f"all wait: {sorted(ready)}"
        for pair in met:
            for rank in pair:
                left[rank].popleft()
        meetings += len(met)
    assert meetings == sum(pair[0] < 64 for pair in pairs)


def test_a_subgroup_uses_links_that_the_whole_run_has_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Process groups are named by counting: two subgroups that made some would connect across."""
    made = []
    for rank in (1, 2):
        fake, communicator = joined(monkeypatch, rank)
        groups = [communicator.subgroup(ranks) for ranks in ((0, 1), (2, 3))]
        (group,) = [own for own in groups if own is not None]
        with FakeTensorMode():
            with pytest.raises(AssertionError, match="connect the whole run before"):
                group.connect([(0, 1)])
            communicator.connect([(0, 1), (2, 3)])
            group.connect([(0, 1)])
        made.append((fake.calls, fake.met))
    assert made == [([tuple(range(WORLD))] * 2, [(0, 1)]), ([tuple(range(WORLD))] * 2, [(2, 3)])]


CPU, BOTH = RankKind("0", "cpu"), "cpu:gloo,cuda:nccl"


@pytest.mark.parametrize("rank", range(3))
@pytest.mark.parametrize(
    ("kinds", "backends"), [((*GPUS[:2], CPU), [BOTH, "gloo", "gloo"]), ((CPU, CPU, CPU), [None, None, None])]
)
def test_every_rank_asks_for_the_same_groups(
    rank: int, kinds: tuple[RankKind, ...], backends: list[str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake, communicator = joined(monkeypatch, rank, kinds)
    chosen: list[Any] = [(0, 1), (0, 2), (2,)]
    made = [communicator.subgroup(ranks) for ranks in chosen]
    assert fake.subgroups == list(zip(chosen, backends, strict=True))
    for ranks, part in zip(chosen, made, strict=True):
        assert (part is None) == (rank not in ranks)
        assert not isinstance(part, TorchCommunicator) or part.kinds == tuple(kinds[each] for each in ranks)


def test_groups_on_gpus_outlast_the_watchdog_send_bytes_and_take_few_thread_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """NCCL ends the rank that waits, whoever keeps it waiting; it has no type for some numbers."""
    fake, communicator = joined(monkeypatch, 0)
    with FakeTensorMode():
        communicator.connect([(0, 1), (1, 0)])
        for dtype in (torch.int16, torch.uint16, torch.uint32, torch.uint64, torch.bool, torch.complex64):
            communicator.isend(torch.empty(3, 4, dtype=dtype, device="cuda"), 1, 0)
            communicator.irecv(torch.empty((), dtype=dtype, device="cuda"), 1, 0)
    assert fake.dtypes == {torch.uint8}
    assert [options.config.max_ctas for options in fake.options] == [4, 4]
    assert fake.options[0] is not fake.options[1]  # torch writes the name of the group there
    waits = dict[str, float]()
    monkeypatch.setattr(
        torch_comm, "join_group", lambda kind, *rest: waits.update({kind.kind: rest[2].total_seconds()}) or (kind,)
    )
    monkeypatch.setattr(torch_comm, "has_gpu_each", lambda _: False)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.setenv(name, "0")
    for kind in ("cpu", "cuda"):
        TorchCommunicator(torch.device(kind), 100, 60, RankKind("host", kind))
    assert waits["cpu"] == 100
    assert waits["cuda"] > 100 + WAITING_LONGER_S


def talk(communicator: Any, _: Any) -> list[list[float]]:
    """What this rank receives over links of its own: both ways at once, between the neighbours of a ring."""
    rank, world = communicator.rank, communicator.world
    links = Links(rank, world, timedelta(seconds=60), torch.device("cpu"), backend="gloo")
    forward = [(n, (n + 1) % world) for n in range(world)]
    # Each rank is told in another order, and of links that it has no part in.
    links.connect(forward[rank:] + forward[:rank], by_all=True)
    links.connect([(target, source) for source, target in forward], by_all=True)
    after, before = (rank + 1) % world, (rank - 1) % world
    places = [torch.zeros(2) for _ in range(2)]
    works = [links.irecv(places[0], before), links.irecv(places[1], after)]
    works += [links.isend(torch.full((2,), 10.0 * rank), after), links.isend(torch.full((2,), 10.0 * rank + 1), before)]
    for work in works:
        work.wait()
    return [place.tolist() for place in places]


@pytest.mark.process
def test_links_carry_messages_between_processes(tmp_path: Path) -> None:
    got = run_on_ranks(4, f"{__name__}:talk", tmp_path)
    assert got == [[[10.0 * ((rank - 1) % 4)] * 2, [10.0 * ((rank + 1) % 4) + 1] * 2] for rank in range(4)]
