"""How much of the time that halos travel a team computes meanwhile, on links made slow."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor

from app.launch.place import take_cores
from benchmarks.teams.delayed import Delayed
from benchmarks.teams.passes import Problem
from parallel.comm.communicator import Communicator
from parallel.space.team import Grid
from parallel.team.halo_exchange import BoundExchange
from parallel.team.team_comm import Recv, TeamComm, Wait

WAYS = ("at once", "overlapped")
"""Halos that are waited for before anything is computed, and halos that travel meanwhile, as in teams."""


class Noting(TeamComm):
    """Notes pieces of maps that travel by themselves, and no sums."""

    def __init__(self, slow: Delayed) -> None:
        super().__init__(slow)  # type: ignore[arg-type]
        self._slow = slow

    def _swap(self, sends: Any, recvs: Any, counted: bool = True) -> list[Recv]:
        self._slow.noted = counted
        return super()._swap(sends, recvs, counted)


class AtOnce(Noting):
    """Waits for what it asks for before anything else is computed."""

    def fetch(self, exchange: BoundExchange, own: Tensor, record: bool = True) -> Wait:
        return _here(super().fetch(exchange, own, record))

    def send_halo_grads(self, exchange: BoundExchange, gradients: Any, like: Tensor) -> Wait:
        return _here(super().send_halo_grads(exchange, gradients, like))


def _here(halos: Wait) -> Wait:
    pieces = halos()
    return lambda: pieces


def on_rank(communicator: Communicator, argument: dict[str, Any]) -> dict[str, Any]:
    """Return by way, and by round: seconds of a pass, and when messages were sent and waited for, by peer; ``fast``:
    seconds of a pass over the links as they are."""
    take_cores(torch.device("cpu"))
    problem, grid = Problem(argument["model"], argument["side"]), Grid.parse(argument["grid"])
    slow = {way: Delayed(communicator, argument["delay_s"]) for way in WAYS}
    links = {way: (AtOnce if way == "at once" else Noting)(slow[way]) for way in WAYS}
    members = {way: problem.member(communicator, grid, links[way]) for way in WAYS}
    members["fast"] = problem.member(communicator, grid)
    took: dict[str, Any] = {way: [] for way in members}
    for k in range(argument["rounds"] + 1):
        for way in sorted(members, reverse=bool(k % 2)):
            for link in slow.values():
                link.sent.clear()
                link.asked.clear()
            communicator.barrier()
            start = time.perf_counter()
            members[way].one_pass()
            communicator.barrier()
            if k:  # the first round warms up
                took[way].append({"wall": time.perf_counter() - start})
                if way in slow:
                    took[way][-1] |= {"sent": dict(slow[way].sent), "asked": dict(slow[way].asked)}
    return took
