"""Messages of a team: in one order for all members, and halos travel while a member computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from parallel.comm.communicator import Communicator, Work
from parallel.comm.thread_comm import run_on_threads
from parallel.space.rule import Window
from parallel.space.team import Box, Grid, SpatialMesh
from parallel.streaming.patch import cut_of, narrowed
from parallel.team.convolution import HaloConvolution, sharded_convolution
from parallel.team.halo_exchange import BoundExchange, patch_of
from parallel.team.team_comm import TeamComm

SIDES = (12, 12)


class Noted:
    """A communicator that notes what is asked of it."""

    exchange = Communicator.exchange

    def __init__(self, inner: Communicator, note: Callable[[Any], None]) -> None:
        self.rank, self.world, self._inner, self._note = inner.rank, inner.world, inner, note

    def isend(self, tensor: Tensor, peer: int, tag: int) -> Work:
        self._note((self.rank, peer))
        return self._inner.isend(tensor, peer, tag)

    def irecv(self, tensor: Tensor, peer: int, tag: int) -> Work:
        self._note((peer, self.rank))
        return NotedWork(self._inner.irecv(tensor, peer, tag), self._note)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class NotedWork:
    def __init__(self, work: Work, note: Callable[[Any], None]) -> None:
        self._work, self._note = work, note

    def wait(self) -> None:
        self._note("wait")
        self._work.wait()

    def done(self) -> bool:
        return self._work.done()


def left_waiting(orders: list[list[tuple[int, int]]]) -> int:
    """Return messages that never arrive where each member does one thing after the other, and a message only when both
    of its members have come to it."""
    orders = [list(order) for order in orders]
    while True:
        met = next((o[0] for o in orders if o and all(orders[m][:1] == [o[0]] for m in o[0])), None)
        if met is None:
            return sum(map(len, orders)) // 2
        for member in met:
            orders[member].pop(0)


@pytest.mark.parametrize("grid", [Grid(2, 1), Grid(2, 2), Grid(3, 2)], ids=str)
def test_nobody_waits_in_a_circle_even_where_messages_go_one_by_one(grid: Grid) -> None:
    rule = Window(5, 1, 1, 2, 2)
    exchange = SpatialMesh(grid, SIDES).exchange((rule, rule), SIDES, SIDES)

    def rank(communicator: Communicator, _: Any) -> list[tuple[int, int]]:
        order: list[Any] = []
        link = TeamComm(Noted(communicator, order.append))  # type: ignore[arg-type]
        whole = torch.arange(144.0).reshape(1, 1, *SIDES)
        box = exchange.owned[link.member]
        own = part(whole, box)
        bound = BoundExchange(exchange, link.member, (2, 3))
        halos = link.fetch(bound, own)()
        for piece, halo in zip(exchange.recvs[link.member], halos, strict=True):
            assert torch.equal(halo, part(whole, piece.box))
        back = link.send_halo_grads(bound, halos, own)()
        for (_, sent), arrived in zip(exchange.sends[link.member], back, strict=True):
            assert torch.equal(arrived, narrowed(own, (2, 3), cut_of(sent, box)))
        link.finish()
        return [each for each in order if each != "wait"]

    orders = run_on_threads(grid.members, rank)
    assert left_waiting(orders) == 0
    turned = [[*reversed(orders[0])], *orders[1:]]
    assert left_waiting(turned) > 0, "an order of one's own would be told"


def test_halos_travel_while_a_member_computes() -> None:
    rule, sides = Window(3, 1, 1, 1, 1), (24, 16)
    exchange = SpatialMesh(Grid(2, 1), sides).exchange((rule, rule), sides, sides)
    torch.manual_seed(0)
    whole, weight = torch.randn(1, 4, *sides), torch.randn(4, 4, 3, 3)

    def rank(communicator: Communicator, _: Any) -> list[Any]:
        notes: list[Any] = []
        link, member = TeamComm(Noted(communicator, notes.append)), communicator.rank  # type: ignore[arg-type]
        made, own = exchange.owned[member], part(whole, exchange.owned[member]).clone().requires_grad_()
        with Convolutions(notes), torch.autograd.set_multithreading_enabled(False):
            patch = patch_of(exchange, member, None, made, sides, (2, 3))
            work = HaloConvolution(
                BoundExchange(exchange, member, (2, 3)), patch, (rule, rule), own.numel(), weight.numel()
            )
            y = sharded_convolution(link, own, work, weight, None, 1)
            y.backward(part(torch.ones(1, 4, *sides), made))
        link.finish()
        return notes

    for member, notes in enumerate(run_on_threads(2, rank)):
        forward, back = notes[: notes.index("wait") + 1], notes[notes.index("wait") + 1 :]
        assert [note for note in forward if note != "wait"][-1] == ("convolution", 12), "its rows, before it waits"
        sent = back.index((member, 1 - member))
        assert ("convolution_backward", 12) in back[sent : back.index("wait")], "gradients of its rows, meanwhile"


class Convolutions(TorchDispatchMode):
    """Notes the rows of convolutions."""

    def __init__(self, notes: list[Any]) -> None:
        super().__init__()
        self._notes = notes

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), given: Any = None) -> Any:
        name = function.overloadpacket.__name__
        if name in ("convolution", "convolution_backward"):
            self._notes.append((name, arguments[0].shape[2]))
        return function(*arguments, **(given or {}))


def part(whole: Tensor, box: Box) -> Tensor:
    return whole[:, :, slice(*box[0]), slice(*box[1])]
