"""Every rank of a group proves to every other that it belongs to the run.

Takes a group over Gloo, whose ports do not ask who connects, and the key that only the ranks have been given; raises
where somebody else has taken a rank's place. Each challenges the other with a number of its own, and answers with that
number under the key: what is overheard or sent back proves nothing.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from parallel.comm.communicator import CommunicationError, Work

KEY = "MEGATILE_KEY"
"""Variable of the key, made anew by what starts the ranks; other users cannot read a process's environment."""
BYTES = 32
TAG = 32766
"""Kept clear of by the messages of a step."""


def prove_membership(
    isend: Callable[[Tensor, int, int], Work],
    irecv: Callable[[Tensor, int, int], Work],
    rank: int,
    others: Iterable[int],
    key: str,
) -> None:
    """Return once all ``others`` have answered as ranks of this run do.

    Args:
        isend, irecv: of a communicator, between ranks of the group.
        rank: of this process.
        key: of the run.

    Raises:
        CommunicationError: one did not.
    """
    others = list(others)
    numbers = {peer: secrets.token_bytes(BYTES) for peer in others}
    theirs = _exchange(isend, irecv, numbers)
    answers = _exchange(isend, irecv, {peer: _answer(key, rank, peer, theirs[peer]) for peer in others})
    for peer in others:
        if not hmac.compare_digest(answers[peer], _answer(key, peer, rank, numbers[peer])):
            raise CommunicationError(
                f"rank {rank}: what answers as rank {peer} does not know the key of this run: another process of this "
                "machine has connected in its place; see who else is on it, and start the run again"
            )


def _exchange(
    isend: Callable[[Tensor, int, int], Work], irecv: Callable[[Tensor, int, int], Work], out: dict[int, bytes]
) -> dict[int, bytes]:
    received = {peer: torch.empty(BYTES, dtype=torch.uint8) for peer in out}
    works = [irecv(tensor, peer, TAG) for peer, tensor in received.items()]
    works += [isend(torch.frombuffer(bytearray(data), dtype=torch.uint8), peer, TAG) for peer, data in out.items()]
    for work in works:
        work.wait()
    return {peer: tensor.numpy().tobytes() for peer, tensor in received.items()}


def _answer(key: str, sender: int, receiver: int, number: bytes) -> bytes:
    return hmac.digest(key.encode(), f"{sender}>{receiver}:".encode() + number, hashlib.sha256)
