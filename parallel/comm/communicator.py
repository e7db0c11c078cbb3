"""What the ranks of a run can say to each other.

One protocol; ``local`` (one process), ``torch_comm`` (torch.distributed: Gloo, NCCL), ``mpi_comm`` (mpi4py) and
``thread_comm`` (ranks as threads of one process) implement it. Ranks are 0..world-1. There is no blocking send: a
schedule that is right with sends that return at once stays free of deadlock on every implementation.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn


class CommunicationError(RuntimeError):
    """A rank that cannot be reached, or that stopped answering: says which operation on which rank."""


class ToldElsewhere(CommunicationError):
    """The same, of which another rank tells the user."""


class Work(Protocol):
    """An operation under way. The tensor it was given belongs to it until it is done."""

    def wait(self) -> None:
        """Return when the operation is done here: data received or summed, or the sent tensor free for reuse.

        Raises:
            CommunicationError: another rank is gone or did not answer in time.
        """
        ...

    def done(self) -> bool:
        """True once ``wait`` would return at once; never blocks. May stay False until ``wait`` where the library
        underneath does not tell."""
        ...


class Shards(Protocol):
    """A module whose parameters lie in parts on the ranks. Its forward and backward passes are collective: every rank
    makes as many, of the same submodules in the same order."""

    def forward(self, *inputs: Any) -> Any:
        """The module's own, gathered unit by unit.

        Raises:
            ValueError: the module uses parameters of a submodule that it does not call.
        """
        ...

    def reduce_gradients(self, wanted: bool) -> None:
        """Whether the backward passes that follow sum gradients over the ranks, or add them up whole on this one."""
        ...

    def release(self) -> None:
        """Let go of what the last forward pass left gathered."""
        ...

    def whole(self, tensor: Tensor) -> Tensor:
        """All of a parameter, gradient or state of which each rank has a part; every rank takes part. Anything else is
        given back as it is."""
        ...

    def part_like(self, whole: Tensor, parameter: Tensor) -> Tensor:
        """This rank's part of ``whole``, divided as ``parameter``; nothing is sent."""
        ...


class Communicator(Protocol):
    """A fixed group of ranks. Every rank calls the collective operations in the same order.

    Tensors of sends, receives and sums are dense (contiguous in some order of dims is enough) and on the CPU or the
    rank's device; receives and sums write in place.
    """

    rank: int
    world: int
    local_rank: int
    """Number of this rank on its machine; chooses the device."""

    def connect(self, pairs: Collection[tuple[int, int]]) -> None:
        """Make ready for tensors on the device to go from rank to rank; those on the CPU need it not.

        Every rank calls it with the same pairs. Those of a subgroup must have been among the pairs of the whole run.

        Args:
            pairs: (sender, receiver), of all ranks.
        """
        ...

    def isend(self, tensor: Tensor, peer: int, tag: int) -> Work:
        """Begin to send ``tensor`` to rank ``peer``. Messages of one tag to one peer arrive in the order sent.

        Args:
            tag: 0 to 32767.
        """
        ...

    def irecv(self, tensor: Tensor, peer: int, tag: int) -> Work:
        """Begin to receive into ``tensor`` what rank ``peer`` sends with ``tag``; number of bytes and dtype agree."""
        ...

    def iall_reduce(self, tensor: Tensor) -> Work:
        """Begin to sum ``tensor`` over all ranks, in place; the result has the same bits on every rank."""
        ...

    def all_reduce(self, tensor: Tensor) -> None:
        """Sum ``tensor`` over all ranks, in place on every rank.

        Raises:
            CommunicationError: another rank is gone or did not answer in time.
        """
        ...

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        """Give every rank the ``tensor`` of rank ``source``, in place."""
        ...

    def barrier(self) -> None:
        """Return once every rank has called it."""
        ...

    def subgroup(self, ranks: Sequence[int]) -> Communicator | None:
        """A communicator of ``ranks`` alone, renumbered 0..len-1 in the order given; None on ranks not among them.

        Every rank of this communicator calls it, all with the same arguments in the same order.
        """
        ...

    def replicate(self, module: nn.Module, bucket_bytes: int | None = None) -> nn.Module:
        """``module`` with its gradients averaged over the ranks during backward, or itself when there is one rank.

        The replica has ``no_sync()``, a context in which gradients only add up locally.

        Args:
            bucket_bytes: gradients summed at once, as soon as a backward pass has made them; 0: all, at its end; None:
                as the library underneath does.
        """
        ...

    def shard(self, module: nn.Module, units: Sequence[Sequence[nn.Module]], device: torch.device) -> Shards:
        """Divide the parameters of ``module``, the same on every rank, among the ranks, in place.

        Args:
            units: runs of submodules that are gathered together, inner ones first.
            device: of the parts, and of what is gathered.

        Raises:
            ValueError: this communicator cannot, or one of the modules; says what to use instead.
        """
        ...

    def abort(self) -> None:
        """This rank has failed: bring the others down now. A rank that is a process ends here; where the launcher ends
        the others once one has failed, that is all it does."""
        ...

    def close(self) -> None: ...


def cannot_shard(ranks: str) -> ValueError:
    """Why ``ranks`` cannot hold a model in parts, and what to do."""
    return ValueError(
        f"--parallel fsdp is torch's own and talks over torch.distributed between 2 processes or more; got {ranks}: "
        "start them with --ranks or torchrun (app.verify: --communicator gloo), or use --parallel ddp"
    )


def agree(communicator: Communicator, flag: bool) -> bool:
    """True on every rank when ``flag`` is true on any."""
    votes = torch.tensor([int(flag)])
    communicator.all_reduce(votes)
    return bool(votes.item())
