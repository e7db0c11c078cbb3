"""torch.distributed over NCCL and Gloo between simulated GPUs, for ``ranks``.

Stands in for ``torch.distributed`` in ``parallel.comm.torch_*``. Tensors of a GPU go over NCCL: each communicator has a
stream on each member, on which its operations run in turn, each at one time on all members; ``wait`` is that of a
stream. The first operation holds the host until all members have come. Tensors of the host go over Gloo, by tags.
What NCCL would refuse raises what it raises there; what would hang, or mix up numbers, is a ``Hang`` that says why.
"""

from __future__ import annotations

import collections
import types
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as real
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from tests.helpers.sim_gpu.memory import true
from tests.helpers.sim_gpu.timeline import Hang, Meeting
from tests.helpers.sim_gpu.works import OPPOSITE, GlooWork, Group, Member, NcclWork, Share

if TYPE_CHECKING:
    from tests.helpers.sim_gpu.gpus import Gpus, Process

NCCL_TYPES = {
    *(torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2),
}


class Distributed:
    """The names of ``torch.distributed`` that are used."""

    DistError, DistBackendError, DistNetworkError = real.DistError, real.DistBackendError, real.DistNetworkError
    ProcessGroupNCCL = getattr(real, "ProcessGroupNCCL", None)

    def __init__(self, gpus: Gpus, world: int, store: Any) -> None:
        self._gpus, self._world = gpus, world
        self._defaults: dict[Process, Group] = {}
        self._counts: collections.Counter[Process] = collections.Counter()
        self._made: dict[str, tuple[str, int]] = {}
        self._came: dict[str, dict[int, tuple[str, int]]] = {}
        self._shared: dict[str, Any] = collections.defaultdict(dict)
        self._mail: dict[tuple[Any, ...], collections.deque[Share]] = collections.defaultdict(collections.deque)
        self._watched: dict[Process, list[NcclWork]] = collections.defaultdict(list)
        self.distributed_c10d = types.SimpleNamespace(_get_default_store=lambda: store)

    def init_process_group(self, backend: str, store: Any, rank: int, world_size: int, timeout: timedelta) -> None:
        assert (rank, world_size) == (self._gpus.process.rank, self._world)
        self._counts[self._gpus.process] = 1
        self._default_backend = backend
        self._defaults[self._gpus.process] = self._make("0", range(world_size), backend)

    def destroy_process_group(self) -> None:
        for work in self._watched[self._gpus.process]:
            work.let_go()
        del self._defaults[self._gpus.process]

    @property
    def group(self) -> Any:
        return types.SimpleNamespace(WORLD=self._defaults.get(self._gpus.process))

    def new_group(
        self,
        ranks: Sequence[int],
        timeout: timedelta | None = None,
        backend: str | None = None,
        pg_options: Any = None,
        use_local_synchronization: bool = False,
    ) -> Any:
        """Groups are named by how many this rank has made before; all ranks make the same ones, or, with local
        synchronization, those of the group."""
        process, ranks = self._gpus.process, sorted(ranks)
        if use_local_synchronization and process.rank not in ranks:
            return real.GroupMember.NON_GROUP_MEMBER
        count = self._counts[process]
        self._counts[process] += 1
        name = f"{count} of {ranks} alone" if use_local_synchronization else f"{count}"
        return self._make(name, ranks, backend or self._default_backend)

    def isend(self, tensor: Tensor, dst: int, group: Group | None = None, tag: int = 0) -> Any:
        return self._message("send", tensor, dst, group, tag)

    def irecv(self, tensor: Tensor, src: int, group: Group | None = None, tag: int = 0) -> Any:
        return self._message("receive", tensor, src, group, tag)

    def all_reduce(self, tensor: Tensor, op: Any = None, group: Group | None = None, async_op: bool = False) -> Any:
        assert op is None, "only sums"
        return self._collective("all_reduce", tensor, group, async_op, _sum)

    def reduce_scatter_tensor(
        self, output: Tensor, tensor: Tensor, group: Group | None = None, async_op: bool = False
    ) -> Any:
        own = self._group(group)
        assert output.data_ptr() == tensor.view(len(own.ranks), -1)[own.number].data_ptr(), "only in place"

        def run(tables: list[Tensor]) -> None:
            rows = [table.view(len(tables), -1) for table in tables]
            for number, row in enumerate(rows):
                row[number].copy_(sum(row[number] for row in rows[1:]) + rows[0][number])

        return self._collective("reduce_scatter", tensor, group, async_op, run)

    def broadcast(self, tensor: Tensor, src: int, group: Group | None = None, async_op: bool = False) -> Any:
        root = self._group(group).ranks.index(src)
        run: Callable[[list[Tensor]], object] = lambda tensors: [each.copy_(tensors[root]) for each in tensors]  # noqa: E731
        return self._collective(f"broadcast from {src}", tensor, group, async_op, run)

    def all_gather(self, parts: Sequence[Tensor], tensor: Tensor, group: Group | None = None) -> None:
        table = parts[0].as_strided((len(parts), tensor.numel()), (tensor.numel(), 1))
        table[self._group(group).number] = tensor
        run: Callable[[list[Tensor]], object] = lambda tables: [  # noqa: E731
            each[number].copy_(table[number]) for number, table in enumerate(tables) for each in tables
        ]
        self._collective("all_gather", table, group, False, run)

    def P2POp(self, call: Any, tensor: Tensor, peer: int, group: Group | None = None) -> Any:
        return "send" if call == self.isend else "receive", tensor, peer, group

    def batch_isend_irecv(self, messages: Sequence[Any]) -> list[Any]:
        """Messages between some members of a communicator, side by side: they follow what the communicator did before,
        and precede what follows. All members have come to it before, or the first ones wait for the others."""
        gpus, (_, tensor, _, group) = self._gpus, messages[0]
        group, device = self._group(group), tensor.get_device()
        with gpus.timeline.lock:
            whole = self._member(group, "all", group.number, len(group.ranks), device)
            stream = torch.cuda.Stream(of=whole.stream)  # type: ignore[call-arg]
            stream.wait_stream(torch.cuda.current_stream(device))
            keys = []
            for operation, tensor, peer, _ in messages:
                to = group.ranks.index(peer)
                pair = (group.number, to) if operation == "send" else (to, group.number)
                key, number = f"{pair[0]}>{pair[1]}", pair.index(group.number)
                assert self._backend(tensor, group) == "nccl"
                self._over_nccl(group, key, number, 2, operation, tensor, True, _handed_over, whole)
                keys.append(key)
            for key in keys:
                stream.wait_stream(torch.cuda.Stream(of=group.members[key].stream))  # type: ignore[call-arg]
            done = stream.record_event()
            whole.last = next(iter(whole.stream.last), None)
            work = NcclWork(gpus, [tensor for _, tensor, _, _ in messages], whole.stream, done)
            self._watch(work)
            return [work]

    def _watch(self, work: NcclWork) -> None:
        watched = self._watched[self._gpus.process]
        watched[:] = [each for each in (*watched, work) if each.is_held()]

    def barrier(self, group: Group | None = None) -> None:
        self._collective("barrier", torch.empty(0), group, False, lambda _: None)

    def _group(self, group: Group | None) -> Group:
        return group or self._defaults[self._gpus.process]

    def _make(self, name: str, ranks: Sequence[int], backend: str) -> Any:
        rank = self._gpus.process.rank
        told = f"{list(ranks)} over {backend}"
        with self._gpus.timeline.lock:
            known, first = self._made.setdefault(name, (told, rank))
            if known != told:
                raise Hang(f"group {name}: rank {rank} makes one of ranks {told}, rank {first} one of ranks {known}")
        if rank not in ranks:
            return real.GroupMember.NON_GROUP_MEMBER
        kinds = dict(part.split(":") for part in backend.split(",")) if ":" in backend else {}
        backends = kinds or ({"cuda": "nccl"} if backend == "nccl" else {"cpu": backend, "cuda": backend})
        number = list(ranks).index(rank)
        if "gloo" in backends.values():  # connects its members at once
            self._come(f"group {name} of ranks {told}", number, len(ranks), -1)
        return Group(name, tuple(ranks), number, backends)

    def _come(self, name: str, number: int, size: int, device: int) -> None:
        """Return once all members of ``name`` have come."""
        process, timeline = self._gpus.process, self._gpus.timeline
        with timeline.lock:
            came = self._came.setdefault(name, {})
            if number in came:
                raise Hang(f"{process} and {came[number][0]} both come to {name} as its member {number}")
            if device >= 0 and any(other == device for _, other in came.values()):
                raise real.DistBackendError(f"NCCL error: invalid usage: Duplicate GPU detected: cuda:{device}")
            came[number] = str(process), device
            timeline.note()
            timeline.block(lambda: len(came) == size, f"{process} waits for the members of {name}")

    def _backend(self, tensor: Tensor, group: Group) -> str:
        kind = tensor.device.type
        if kind not in group.backends:
            raise RuntimeError(f"No backend type associated with device type {kind}")
        if not tensor.is_contiguous():
            raise ValueError("Tensors must be contiguous")
        if group.backends[kind] == "nccl" and tensor.dtype not in NCCL_TYPES:
            raise TypeError(f"Input tensor data type is not supported for NCCL process group: {tensor.dtype}")
        return group.backends[kind]

    def _message(self, operation: str, tensor: Tensor, peer: int, group: Group | None, tag: int) -> Any:
        group, rank = self._group(group), self._gpus.process.rank
        if self._backend(tensor, group) == "nccl":
            pair = sorted((group.number, group.ranks.index(peer)))
            key, number = f"{pair[0]}:{pair[1]}", pair.index(group.number)
            return self._over_nccl(group, key, number, 2, operation, tensor, True, _handed_over)
        if tensor.is_cuda:
            raise RuntimeError("ProcessGroupGloo::send: unsupported device type cuda")
        what = f"{self._gpus.process}: Gloo's {operation}, tag {tag}, of rank {peer}"
        work = GlooWork(self._gpus, what, tensor, None if operation == "send" else lambda: None)
        own, way = Share(what, operation, tensor, work), (rank, peer) if operation == "send" else (peer, rank)
        with self._gpus.timeline.lock:
            waiting = self._mail[group.name, *way, tag, OPPOSITE[operation]]
            if not waiting:
                self._mail[group.name, *way, tag, operation].append(own)
                return work
            other = waiting.popleft()
            own.check(other, "Gloo")
            self._perform([own, other], lambda _: _handed_over([own, other]))
        return work

    def _collective(
        self, operation: str, tensor: Tensor, group: Group | None, async_op: bool, run: Callable[[list[Tensor]], object]
    ) -> Any:
        group = self._group(group)
        size = len(group.ranks)
        of_shares: Callable[[Sequence[Share]], object] = lambda shares: run([share.tensor for share in shares])  # noqa: E731
        if self._backend(tensor, group) == "nccl":
            return self._over_nccl(group, "all", group.number, size, operation, tensor, async_op, of_shares)
        host = tensor.cpu() if tensor.is_cuda else tensor
        what = f"{self._gpus.process}: Gloo's {operation} in group {group.name} of ranks {list(group.ranks)}"
        work = GlooWork(self._gpus, what, host, lambda: tensor is host or tensor.copy_(host))
        group.collectives += 1
        with self._gpus.timeline.lock:
            shares = self._shared[f"{group.name} {group.collectives}"]
            own = Share(what, operation, host, work)
            for other in shares.values():
                own.check(other, f"Gloo, group {group.name}")
            shares[group.number] = own
            if len(shares) == size:
                self._perform([shares[number] for number in range(size)], of_shares)
        if async_op:
            return work
        work.wait()
        return None

    def _perform(self, shares: Sequence[Share], run: Callable[[Sequence[Share]], object]) -> None:
        with torch.no_grad(), _disable_current_modes():
            run(shares)
        for share in shares:
            assert share.work is not None
            share.work.met = True
        self._gpus.timeline.note()

    def _member(
        self, group: Group, key: str, number: int, size: int, device: int, whole: Member | None = None
    ) -> Member:
        """Return this process's member of a communicator; made, with a stream of its own, once all members have come.
        Messages in a batch belong to the communicator ``whole``, and need no other."""
        if key not in group.members:  # its id is in the store of all ranks, by the name of the group and the key
            if whole is None:
                self._come(f"communicator {key} of group {group.name}", number, size, device)
            stream = self._gpus.pool_stream(device) if whole is None else self._gpus.timeline.stream(device)
            group.members[key] = Member(stream, self._shared[f"{group.name}/{key}"])
        return group.members[key]

    def _over_nccl(
        self,
        group: Group,
        key: str,
        number: int,
        size: int,
        operation: str,
        tensor: Tensor,
        async_op: bool,
        run: Callable[[Sequence[Share]], object],
        whole: Member | None = None,
    ) -> Any:
        """Launch an operation of the communicator ``key`` of a group, as its member ``number``.

        Args:
            whole: of a message in a batch: this member of the group's communicator, which it is part of.
        """
        gpus, process, device = self._gpus, self._gpus.process, tensor.get_device()
        with gpus.timeline.lock:
            name = f"communicator {key} of group {group.name} of ranks {list(group.ranks)}"
            member, memory = self._member(group, key, number, size, device, whole), gpus.memories.of(tensor)
            assert memory is not None
            stream = member.stream if async_op else gpus.current_stream(device)
            if async_op:
                before = torch.cuda.current_stream(device) if whole is None else torch.cuda.Stream(of=whole.stream)  # type: ignore[call-arg]
                torch.cuda.Stream(of=stream).wait_stream(before)  # type: ignore[call-arg]
            reads_only = operation in ("send", f"broadcast from {process.rank}")
            process.hazards.access(
                stream.number, f"NCCL's {operation}", [memory.number], [] if reads_only else [memory.number]
            )
            shares: dict[int, Share] = {}
            meeting = Meeting(size, lambda: run([shares[number] for number in range(size)]))
            meeting, shares = member.shared.setdefault(member.count, (meeting, shares))
            own = Share(str(process), operation, true(tensor, memory))
            for other in shares.values():
                own.check(other, f"{name}, operation {member.count}")
            shares[number] = own
            member.count += 1
            last = [] if member.last is None else [member.last]
            member.last = gpus.timeline.launch(stream, f"{operation}, {name}", after=last, meeting=meeting)
            if not async_op:
                return None
            if whole is not None:
                return None
            done = torch.cuda.Stream(of=stream).record_event()  # type: ignore[call-arg]
            work = NcclWork(gpus, [tensor], stream, done)
            self._watch(work)
            return work


def _handed_over(shares: Sequence[Share]) -> None:
    source, target = shares if shares[0].operation.startswith("send") else shares[::-1]
    target.tensor.copy_(source.tensor)


def _sum(tensors: Sequence[Tensor]) -> None:
    """In order of rank, whoever comes last."""
    for tensor in tensors[1:]:
        tensors[0].add_(tensor)
    for tensor in tensors[1:]:
        tensor.copy_(tensors[0])
