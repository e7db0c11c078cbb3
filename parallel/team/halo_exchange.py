"""Halo exchange of a map: a member's own part and pieces of others in one tensor; gradients go back to their owners.

The backward pass is the linear adjoint of the forward pass: gradients of rows that were fetched go to their owners and
are added there. So each member's gradients are partial sums, and the sum over the members is exact whichever member
computed what (Hewett and Grady 2020, A linear algebraic approach to model parallelism in deep learning, section 3).

In a region in boxes, a map between parts lies with each member as far as its later boxes look. Rows of others are
fetched once, when the map is there; their gradients are added before the part that made the map goes back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from parallel.space.boxes import Boxes as PlannedBoxes
from parallel.space.cuts import Span
from parallel.space.team import Box, Exchange, overlap
from parallel.streaming.maps import Maps
from parallel.streaming.part_plan import PartPlan, places_of
from parallel.streaming.patch import Patch, cut_of, narrowed, need_and_have
from parallel.streaming.region import Region
from parallel.team.team_comm import TeamComm
from parallel.trace.stage_module import Boxes, layout_of

Dims = tuple[int, int]
Slices = tuple[slice, ...]


class BoundExchange:
    """An exchange as one member runs it on tensors whose rows and columns are ``dims``; made once for a plan.

    Attributes:
        sends: (peer, where in its own part, sizes) of what it sends.
        recvs: (peer, where in the needed box, sizes) of what it receives.
        needed: assembles the needed box (``concat_halo``).
    """

    def __init__(self, exchange: Exchange, member: int, dims: Dims) -> None:
        self.exchange, self.member, self.dims = exchange, member, dims
        self.own, self.box = exchange.owned[member], exchange.boxes[member]
        self.sends = [(peer, slices(dims, box, self.own), sizes(box)) for peer, box in exchange.sends[member]]
        self.recvs = [(p.owner, slices(dims, p.box, self.box), sizes(p.box)) for p in exchange.recvs[member]]
        self.needed = self.concat_halo(self.box)
        self._used = [piece.box for piece in exchange.pieces[member] if piece.owner == member]
        self._used_slices = [(slices(dims, box, self.own), slices(dims, box, self.box)) for box in self._used]

    def concat_halo(self, box: Box) -> Callable[[Tensor, Sequence[Tensor]], Tensor]:
        """Return (own part, received pieces) -> ``box`` of the map in one tensor, in the layout of the own part."""
        copies: list[tuple[int, Slices, Slices]] = []
        number = 0
        for piece in self.exchange.pieces[self.member]:
            source, at = (-1, self.own) if piece.owner == self.member else (number, piece.box)
            number += source >= 0
            if (common := overlap(piece.box, box)) is not None:
                copies.append((source, slices(self.dims, common, box), slices(self.dims, common, at)))
        (rows, columns), (first, second) = sizes(box), self.dims

        def concat(own: Tensor, pieces: Sequence[Tensor]) -> Tensor:
            shape = list(own.shape)
            shape[first], shape[second] = rows, columns
            value = torch.empty(shape, dtype=own.dtype, device=own.device, memory_format=layout_of(own))
            for source, target, part in copies:
                value[target].copy_((own if source < 0 else pieces[source])[part])
            return value

        return concat

    def own_gradient(self, gradient: Tensor, form: Tensor) -> Tensor:
        """Return of the needed box's gradient that of this member's part, zero where no output used it.

        It is written once: pages that are touched for zeros first cost as much as the rest of a pass over a large map.
        """
        if self._used == [self.own]:
            return gradient[self._used_slices[0][1]].clone(memory_format=layout_of(gradient))
        own = torch.zeros(form.shape, dtype=form.dtype, device=form.device)
        for target, part in self._used_slices:
            own[target].copy_(gradient[part])
        return own

    def add_pieces(self, own: Tensor, pieces: Sequence[Tensor]) -> None:
        """Add to this member's gradient what others sent back, in the order of ``sends``."""
        for (_, part, _), piece in zip(self.sends, pieces, strict=True):
            own[part].add_(piece)

    def send_back(self, comm: TeamComm, gradient: Tensor, form: Tensor) -> Callable[[], Tensor]:
        """Send the gradients of what was fetched to their owners.

        Args:
            gradient: of the needed box.
            form: of shape and type of this member's part.

        Returns:
            () -> gradient of this member's part, with what the others send back.
        """
        halos = comm.send_halo_grads(self, [gradient[part] for _, part, _ in self.recvs], form)
        own = self.own_gradient(gradient, form)

        def finish() -> Tensor:
            self.add_pieces(own, halos())
            return own

        return finish


def halo_exchange(comm: TeamComm, exchange: BoundExchange, own: Tensor) -> Tensor:
    """Return the box that this member needs of the map that it owns ``own`` of."""
    if exchange.exchange.is_local:
        return narrowed(own, exchange.dims, cut_of(exchange.box, exchange.own))
    value: Tensor = _HaloExchange.apply(own, comm, exchange)
    return value


class _HaloExchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, comm: TeamComm, exchange: BoundExchange) -> Tensor:
        ctx.comm, ctx.exchange = comm, exchange
        ctx.own = torch.empty((), dtype=own.dtype, device=own.device).expand(own.shape)  # its form alone
        return exchange.needed(own, comm.fetch(exchange, own)())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return ctx.exchange.send_back(ctx.comm, gradients[0], ctx.own)(), None, None


def all_of_own(exchange: Exchange, member: int, patch: Patch) -> Patch | None:
    """Return a patch of this member's part as it is, in place of ``patch``; None where it begins elsewhere. ``patch``
    leaves out the last rows or columns, which a window with a stride does not reach.

    So the map is not copied, and neither is its gradient. A convolution makes no more of it: where no member needs what
    another has (``Exchange.is_local``), the next window begins beyond this part, or it would be this member's.
    """
    need, have, at = patch.need, patch.have, exchange.owned[member]
    if any(h.start != o.start for h, o in zip(have, at, strict=True)):
        return None
    rows, columns = (type(n)(n.start, n.stop + o.stop - h.stop) for n, h, o in zip(need, have, at, strict=True))
    return replace(patch, need=(rows, columns), have=at)


def patch_of(exchange: Exchange, member: int, value: Any, made: Box, sides: tuple[int, int], dims: Dims) -> Patch:
    """Return ``value``, the box that is needed of a map of ``sides``, as what an operation takes to give ``made``."""
    need, has = exchange.needs[member], exchange.boxes[member]
    rows, columns = (need_and_have(need[axis], has[axis], sides[axis]) for axis in (0, 1))
    return Patch(value, (rows[0], columns[0]), (rows[1], columns[1]), made, sides, dims)


def slices(dims: Dims, box: Box, at: Box) -> Slices:
    """Return the index of ``box`` in a tensor that is the part ``at`` of a map."""
    index = [slice(None)] * (max(dims) + 1)
    for dim, span, whole in zip(dims, box, at, strict=True):
        index[dim] = slice(span.start - whole.start, span.stop - whole.start)
    return tuple(index)


def sizes(box: Box) -> tuple[int, int]:
    return box[0].size, box[1].size


class RegionExchange:
    """Exchanges of one region's maps.

    Args:
        parts: by phase.

    Attributes:
        names: of the maps of which a member looks at rows of another; none in a team of one.
        held: rows and columns of a map that this member holds, by name; of others all.
    """

    def __init__(
        self, region: Region, boxes: PlannedBoxes, parts: Sequence[Sequence[PartPlan]], comm: TeamComm
    ) -> None:
        self._region, self._boxes, self._comm = region, boxes, comm
        exchanges = self._find(parts) if comm.members > 1 else {}
        self._exchanges = {name: each for name, each in exchanges.items() if not each.is_local}
        self.names = frozenset(self._exchanges)
        self.held: Mapping[str, Box] = {name: each.boxes[comm.member] for name, each in exchanges.items()}

    def put(self, maps: Maps, name: str, value: Tensor | Boxes) -> None:
        """Take a map that enters, or the gradient of one that leaves: this member's part."""
        if name in self.names:
            assert isinstance(value, Tensor)
            maps.write(name, self._owned(name), value)
        else:
            maps.put(name, value)

    def own_part(self, maps: Maps, name: str) -> Tensor:
        """Return this member's part of a map."""
        return maps.part(name, self._owned(name))

    def fetch(self, maps: Maps, name: str) -> None:
        """Fetch the rows of others that this member looks at, and send those that others look at."""
        exchange, member = self._exchanges[name], self._comm.member
        pieces = exchange.recvs[member]
        leaving = [(target, maps.fetch(name, box).contiguous()) for target, box in exchange.sends[member]]
        arriving = [(piece.owner, maps.empty(name, piece.box)) for piece in pieces]
        for piece, value in zip(pieces, self._comm.swap(leaving, arriving)(), strict=True):
            maps.write(name, piece.box, value)

    def send_back(self, gradients: Maps, name: str, like: Maps) -> None:
        """Send the gradients of rows of others to their owners, and add those that come to this member's own.

        Args:
            like: has the map, where it is still there.
        """
        if name not in gradients and name in like:
            gradients.put_zeros(name, like)
        elif name not in gradients:  # it left, and no gradient came back for it
            gradients.write(name, self._owned(name), torch.zeros((), dtype=self._region.forms[name][1]))
        exchange, member = self._exchanges[name], self._comm.member
        sent = exchange.sends[member]
        leaving = [(p.owner, gradients.fetch(name, p.box).contiguous()) for p in exchange.recvs[member]]
        arriving = [(target, gradients.empty(name, box)) for target, box in sent]
        for (_, box), value in zip(sent, self._comm.swap(leaving, arriving)(), strict=True):
            gradients.add(name, box, value)

    def _owned(self, name: str) -> Box:
        return self._boxes.mesh.owned(self._comm.member, self._region.sides[name])

    def _find(self, parts: Sequence[Sequence[PartPlan]]) -> dict[str, Exchange]:
        """Return by name of a map between parts, or that enters or leaves, which member holds what of it."""
        mesh, sides, members = self._boxes.mesh, self._region.sides, range(self._comm.members)
        looked_at = {name: [[box] for box in mesh.all_owned(sides[name])] for name in self._region.inputs}
        for phase, planned in zip(parts, self._boxes.phases, strict=True):
            for part, paper in zip(phase, planned.parts, strict=True):
                live = [step.name for step in part.live_steps if not step.sums]
                looked_at |= {name: [[box] for box in mesh.all_owned(sides[name])] for name in live}
                # In its backward pass a part finds what it gave, with rims, where its own steps look at it.
                names = (*part.entering, *(name for name in live if name in part.used))
                for member in members:
                    for row, column in places_of(part.box_spans, self._boxes.places(member, paper)):
                        rows, columns = part.rows[row], part.columns[column]
                        for name in names:
                            if name in rows and name in columns:
                                looked_at[name][member].append((rows[name], columns[name]))
        return {
            name: mesh.needed([_hull(boxes) for boxes in by_member], sides[name])
            for name, by_member in looked_at.items()
        }


def _hull(boxes: Sequence[Box]) -> Box:
    """Return the smallest box around ``boxes``."""
    rows, columns = (
        Span(min(span.start for span in spans), max(span.stop for span in spans)) for spans in zip(*boxes, strict=True)
    )
    return rows, columns
