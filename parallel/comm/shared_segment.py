"""Memory that several processes of one machine read and write, which no process leaves behind however it ends.

Takes a communicator of ranks on one machine; gives each of them the same bytes. They lie in a file without a name: what
shares it opens it through the process that made it, so that neither a full /dev/shm nor a rank that dies matters.
"""

from __future__ import annotations

import mmap
import os
import secrets

import torch
from torch import Tensor

from parallel.comm.communicator import CommunicationError, Communicator, agree
from parallel.comm.objects import broadcast_object
from parallel.comm.page_lock import page_lock

HEADER = mmap.PAGESIZE
"""Bytes in front that say whose segment it is: a process of another container may have the number of the maker."""


class SharedSegment:
    """``size`` bytes, zeros at first, shared by all ranks of ``communicator``; every one of them calls it.

    Args:
        communicator: ranks of one machine.
        pinned: page-lock the memory in this process, where the system allows that, so that a GPU copies it directly.

    Raises:
        CommunicationError: the ranks do not share memory, or another one is gone.
    """

    def __init__(self, communicator: Communicator, size: int, *, pinned: bool = False) -> None:
        made = communicator.rank == 0
        token = secrets.token_hex()
        file = os.memfd_create("megatile-sums") if made else -1
        if made:
            os.ftruncate(file, HEADER + size)
            os.pwrite(file, token.encode(), 0)
        process, number, token = broadcast_object(communicator, (os.getpid(), file, token))
        memory, reason = None, ""
        try:
            if not made:
                file = os.open(f"/proc/{process}/fd/{number}", os.O_RDWR)
            memory = mmap.mmap(file, HEADER + size)
            if memory[: len(token)] != token.encode():
                memory, reason = None, f"process {process} is another one there"
        except (OSError, ValueError) as fault:
            reason = str(fault)
        missed = agree(communicator, memory is None)  # after which the maker need not keep its file open
        if file >= 0:
            os.close(file)
        if missed or memory is None:
            raise CommunicationError(
                "ranks that say they are on one machine do not share its memory"
                + (f" (rank {communicator.rank} of them: {reason})" if reason else "")
                + ": start all of a machine's ranks as one user and in one container"
            )
        self._bytes = torch.frombuffer(memory, dtype=torch.uint8)[HEADER:]
        self._unlock = page_lock(self._bytes) if pinned else None

    def part(self, number: int, part_bytes: int, like: Tensor) -> Tensor:
        """Return as many numbers as ``like`` has, of its dtype, at the beginning of part ``number`` of ``part_bytes``
        each."""
        begin = number * part_bytes
        return self._bytes[begin : begin + like.nbytes].view(like.dtype)

    def close(self) -> None:
        """No copy is under way, and none follows."""
        if self._unlock is not None:
            self._unlock()
