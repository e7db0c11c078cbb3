"""The communicator over torch.distributed: Gloo between CPUs, NCCL between GPUs.

Reads the environment that torchrun sets. Only modules named torch_* import torch.distributed.
"""

from __future__ import annotations

import contextlib
import copy
import os
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from parallel.comm.communicator import RECEIVE, SEND, Communicator, Message, Operation, Work
from parallel.comm.device_thread import OrderedTasks
from parallel.comm.kinds import RankKind, are_mixed, backend_of, has_gpu_each, own_kind
from parallel.comm.objects import in_memory_order, pinned_like
from parallel.comm.torch_rendezvous import join_group

AFTER_WATCHDOG_S = 60.0
"""The watchdog of a run names the rank that others wait for at most 30 s after the time limit."""

LINK_CTAS = 4
"""Thread blocks of a link at most; NCCL_MAX_CTAS in the environment goes before it. A receive that waits for its
sender holds its thread blocks, by default up to 32, and what is computed meanwhile has to do without them."""


@dataclass(eq=False)
class TorchWork:
    """An operation under way. ``done`` of a receive over Gloo may stay False until ``wait``."""

    work: Any
    tensors: Sequence[Tensor]
    operation: Operation
    arrive: Callable[[], object] | None = None
    waited: bool = False

    def wait(self) -> None:
        if self.waited:
            return
        with _named(self.operation):
            self.work.wait()
        self.waited = True
        if self.arrive:
            self.arrive()

    def done(self) -> bool:
        return self.waited or (self.arrive is None and bool(self.work.is_completed()))


class TorchCommunicator(Communicator):
    """All ranks of a torchrun job.

    Between GPUs, messages go over NCCL between the ranks that ``connect`` has connected, and exchanges over the group's
    own communicator; messages of other ranks, and all where ranks share a GPU, which NCCL refuses, go through pinned
    host memory over Gloo. There, Gloo sums too.

    Args:
        device: where the tensors of gradients live; CPU tensors always go over Gloo. Where some ranks compute on a CPU
            and others on a GPU, so do those on a GPU, except in groups of GPU ranks alone.
        timeout_s: how long an operation waits for the other ranks before it fails; on a GPU ``AFTER_WATCHDOG_S`` more.
        join_timeout_s: how long the ranks wait for each other to arrive; connecting may take a little more.
        kind: what this rank reports that it computes on; None: ``device``. Tests on CPUs report GPUs.

    Attributes:
        kinds: what each rank computes on, in order.
        nccl: whether the ranks have a GPU each.

    Raises:
        CommunicationError: the ranks did not all arrive within ``join_timeout_s``, or could not reach each other.
    """

    def __init__(
        self, device: torch.device, timeout_s: float, join_timeout_s: float, kind: RankKind | None = None
    ) -> None:
        self.rank = int(os.environ["RANK"])
        self.world = int(os.environ["WORLD_SIZE"])
        self._device = device
        # On a time-out NCCL ends the process of the rank that waits; the watchdog, which names the cause, is earlier.
        self._timeout = timedelta(seconds=timeout_s + AFTER_WATCHDOG_S * (device.type == "cuda"))
        os.environ.setdefault("NCCL_MAX_P2P_NCHANNELS", str(LINK_CTAS))  # of exchanges, as links have it
        self._links = Links(self.rank, self.world, self._timeout, device)
        self._group: Any = None
        self._ranks = tuple(range(self.world))
        # Gloo reports that a message has left only to who waits for it: a rank that computes would hold on to it.
        self._send_reaper = OrderedTasks("sends")
        # All ranks decide from the same table, or some would make groups that the others do not.
        self.kinds = join_group(kind or own_kind(device), self.rank, self.world, self._timeout, join_timeout_s)
        self.nccl = has_gpu_each(self.kinds)

    @property
    def group(self) -> Any:
        """The process group."""
        return self._group or dist.group.WORLD

    def connect(self, pairs: Collection[tuple[int, int]]) -> None:
        if not self.nccl:
            return  # Gloo has connected all ranks
        with _named(Operation(self.rank, self.world, "connecting to the ranks of its pipeline")):
            links = ((self._ranks[source], self._ranks[target]) for source, target in pairs)
            self._links.connect(links, by_all=self._group is None)

    def isend(self, tensor: Tensor, peer: int, tag: int) -> Work:
        flat, target = in_memory_order(tensor.detach()), self._ranks[peer]
        with _named(operation := self._operation(SEND, tensor, peer, tag)):
            if flat.is_cuda and (self._ranks[self.rank], target) in self._links.pairs:
                return TorchWork(self._links.isend(flat, target), [flat], operation)
            host = pinned_like(flat).copy_(flat) if flat.is_cuda else flat
            return self._send_reaper.add(TorchWork(dist.isend(host, target, self._group, tag), [host], operation).wait)

    def irecv(self, tensor: Tensor, peer: int, tag: int) -> Work:
        flat, source = in_memory_order(tensor.detach()), self._ranks[peer]
        with _named(operation := self._operation(RECEIVE, tensor, peer, tag)):
            if not flat.is_cuda:
                return TorchWork(dist.irecv(flat, source, self._group, tag), [flat], operation)
            if (source, self._ranks[self.rank]) in self._links.pairs:
                return TorchWork(self._links.irecv(flat, source), [flat], operation)
            host = pinned_like(flat)
            work = dist.irecv(host, source, self._group, tag)
            return TorchWork(work, [host, flat], operation, arrive=lambda: flat.copy_(host, non_blocking=True))

    def exchange(
        self, sends: Sequence[Message], receives: Sequence[Message], tag: int
    ) -> tuple[list[Work], list[Work]]:
        messages = [(dist.isend, *each) for each in sends] + [(dist.irecv, *each) for each in receives]
        if not (self.nccl and messages and all(tensor.is_cuda for _, _, tensor in messages)):
            return super().exchange(sends, receives, tag)
        peers = ", ".join(str(peer) for peer in dict.fromkeys(peer for _, peer, _ in messages))
        operation = Operation(self.rank, self.world, "exchange with ranks {}, tag {}", (peers, tag))
        flat = [bytes_of(in_memory_order(tensor.detach())) for _, _, tensor in messages]
        with _named(operation):
            (work,) = dist.batch_isend_irecv(
                [
                    dist.P2POp(call, tensor, self._ranks[peer], self._group)
                    for (call, peer, _), tensor in zip(messages, flat, strict=True)
                ]
            )
        together = TorchWork(work, flat, operation)
        return [together] * len(sends), [together] * len(receives)

    def iall_reduce(self, tensor: Tensor) -> Work:
        flat = in_memory_order(tensor.detach())
        with _named(operation := self._operation("all_reduce of {} {}", tensor)):
            return TorchWork(dist.all_reduce(flat, group=self._group, async_op=True), [flat], operation)

    def ireduce_scatter(self, rows: Tensor) -> Work:
        # torch numbers the ranks of a group in ascending order, and has Gloo scatter no sums of GPUs.
        if list(self._ranks) != sorted(self._ranks) or (rows.is_cuda and not self.nccl):
            return self.iall_reduce(rows)
        flat = rows.detach().view(-1)
        real = torch.view_as_real(flat).view(-1) if flat.is_complex() else flat
        own = real.view(self.world, -1)[self.rank]
        with _named(operation := self._operation("reduce_scatter of {} {}", rows)):
            return TorchWork(dist.reduce_scatter_tensor(own, real, group=self._group, async_op=True), [real], operation)

    def all_gather(self, tensor: Tensor) -> Tensor:
        own = tensor.detach().contiguous()
        table = own.new_empty((self.world, *own.shape))
        with _named(self._operation("all_gather into {} {}", table)):
            # As bytes, since libraries lack some types; torch numbers the ranks of a group in ascending order.
            parts = [table[self._ranks.index(rank)].view(-1).view(torch.uint8) for rank in sorted(self._ranks)]
            dist.all_gather(parts, own.view(-1).view(torch.uint8), self._group)
        return table

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        with _named(self._operation("broadcast of {} {} from rank {}", tensor, source)):
            dist.broadcast(bytes_of(in_memory_order(tensor.detach())), self._ranks[source], self._group)

    def barrier(self) -> None:
        with _named(Operation(self.rank, self.world, "barrier")):
            dist.barrier(self._group)

    def subgroup(self, ranks: Sequence[int]) -> Communicator | None:
        chosen = tuple(self._ranks[rank] for rank in ranks)
        with _named(Operation(self.rank, self.world, "making a group of ranks {}", (list(ranks),))):
            # Ranks outside a subgroup know nothing of its subgroups: then the members make it among themselves.
            group = dist.new_group(
                chosen,
                self._timeout,
                backend_of([self.kinds[rank] for rank in ranks]) if are_mixed(self.kinds) else None,
                use_local_synchronization=self._group is not None,
            )
        if self.rank not in ranks:
            return None
        part = copy.copy(self)
        part.rank, part.world = list(ranks).index(self.rank), len(ranks)
        part._group, part._ranks = group, chosen
        part.kinds = tuple(self.kinds[rank] for rank in ranks)
        return part

    def abort(self) -> None:
        """End this process, upon which torchrun ends the others. A regular exit would wait for messages under way."""
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)

    def close(self) -> None:
        if self._group is not None:
            return  # it ends with the whole
        self.barrier()  # a rank that is still talking must not find the others gone
        self._send_reaper.close()
        dist.destroy_process_group()

    def _operation(self, text: str, tensor: Tensor, *values: int) -> Operation:
        return Operation(self.rank, self.world, text, (tensor.shape, tensor.dtype, *values))


class Links:
    """Connections between pairs of GPUs, in two process groups of all ranks: one for messages to higher ranks, one for
    messages to lower ranks.

    A process group connects two ranks at their first message, by an NCCL communicator of both. NCCL knows no tags
    and performs the operations of a communicator one by one: two directions in one would block each other.
    """

    def __init__(self, rank: int, world: int, timeout: timedelta, device: torch.device, backend: str = "nccl") -> None:
        self._rank, self._world = rank, world
        self._timeout = timeout
        self._device = device
        self._backend = backend
        self._groups: list[Any] = []
        self.pairs: set[tuple[int, int]] = set()
        """(sender, receiver) of all ranks that were connected."""

    def connect(self, pairs: Iterable[tuple[int, int]], by_all: bool) -> None:
        """Connect this rank's pairs among ``pairs`` (sender, receiver), which are those of all ranks.

        Args:
            by_all: every rank of the run calls this, with the same pairs. Process groups are made by all ranks.
        """
        new = sorted(set(pairs) - self.pairs)
        assert by_all or not new, f"{new} are connected by some ranks only: connect the whole run before its subgroups"
        self.pairs.update(new)
        if new and not self._groups:
            ranks = range(self._world)
            self._groups = [
                dist.new_group(ranks, self._timeout, self._backend, pg_options=self._options()) for _ in range(2)
            ]
        # NCCL connects at the first message, and the first of two ranks to come waits there for the other: all meet in
        # one order, as those of a schedule may be waited for in a circle.
        for source, target in new:
            if self._rank in (source, target):
                word = torch.zeros(1, device=self._device)
                (self.isend(word, target) if source == self._rank else self.irecv(word, source)).wait()

    def isend(self, flat: Tensor, target: int) -> Any:
        return dist.isend(bytes_of(flat), target, self._groups[self._rank < target])

    def irecv(self, flat: Tensor, source: int) -> Any:
        return dist.irecv(bytes_of(flat), source, self._groups[source < self._rank])

    def _options(self) -> Any:
        if self._backend != "nccl":
            return None
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = self._timeout
        options.config.max_ctas = LINK_CTAS
        return options


def bytes_of(flat: Tensor) -> Tensor:
    """Return a view as bytes: Gloo and NCCL have no 16-bit integers, nor unsigned ones of more than 8 bits."""
    return flat.view(torch.uint8)


@contextlib.contextmanager
def _named(operation: Operation) -> Iterator[None]:
    try:
        yield
    except RuntimeError as fault:  # what torch.distributed raises on time-outs and lost peers alike
        if isinstance(fault, torch.OutOfMemoryError | torch.AcceleratorError):
            raise  # of this rank's own device
        if _is_out_of_memory(fault):
            raise torch.OutOfMemoryError(f"{operation}: NCCL is out of GPU memory: {fault}") from fault
        raise operation.lost(str(fault).splitlines()[0]) from fault


def is_lost_peer(fault: BaseException) -> bool:
    """Return whether ``fault`` is what torch.distributed raises within a backward pass, where fsdp sums gradients, when
    another rank is gone or silent: NCCL has a type for it, Gloo only words."""
    if _is_out_of_memory(fault):
        return False
    return isinstance(fault, dist.DistError) or (isinstance(fault, RuntimeError) and "gloo" in str(fault).lower())


def _is_out_of_memory(fault: BaseException) -> bool:
    words = str(fault).lower()
    return isinstance(fault, dist.DistBackendError) and ("out of memory" in words or "failed to cuda calloc" in words)
