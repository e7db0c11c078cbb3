"""Exchange of samples between members that compute branches of a model: all samples at a fork, own ones at a join.

``collect`` gives members all samples of a map of which each member has its own. ``spread`` gives each member its own
samples of a map that others have whole, summed where several have one. Each is the linear adjoint of the other, so
that the backward pass of a fork is a join, and that of a join is a fork (Jain et al., SUPER, IPDPS 2021, section IV).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from parallel.comm.communicator import Message
from parallel.comm.objects import in_memory_order
from parallel.team.team_comm import TeamComm
from parallel.trace.stage_module import layout_of

MOST_DIMS = 8
"""Dims of a map, at most."""
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
DTYPES = (*FLOATS, torch.int64, torch.int32, torch.uint8, torch.bool)
LAYOUTS = (torch.contiguous_format, torch.channels_last)
Wait = Callable[[], list[Tensor | None]]


@dataclass(frozen=True)
class Form:
    """Form of a map (n, ...), whatever its number of samples.

    Attributes:
        shape: behind the samples.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: torch.memory_format

    @property
    def size(self) -> int:
        """Return the numbers of a sample."""
        return math.prod(self.shape)

    def empty(self, samples: int, device: torch.device) -> Tensor:
        return torch.empty((samples, *self.shape), dtype=self.dtype, device=device, memory_format=self.layout)

    def flat(self, value: Tensor) -> Tensor:
        """Return the numbers of a map in the order of its memory, sample by sample."""
        return in_memory_order(value.detach().to(self.dtype).contiguous(memory_format=self.layout))


def agreed_forms(comm: TeamComm, values: Sequence[Tensor | None]) -> tuple[Form, ...]:
    """Return the forms of some values, each of which one member has; all members call it."""
    table = torch.zeros((len(values), 3 + MOST_DIMS), dtype=torch.int64)
    for row, value in zip(table, values, strict=True):
        if value is not None:
            shape = value.shape[1:]
            form = [DTYPES.index(value.dtype), LAYOUTS.index(layout_of(value)), len(shape), *shape]
            row[: len(form)] = torch.tensor(form)
    rows = comm.all_reduce(table, record=False).tolist()
    return tuple(Form(tuple(sizes[:dims]), DTYPES[kind], LAYOUTS[layout]) for kind, layout, dims, *sizes in rows)


@dataclass(frozen=True, eq=False)
class SampleExchange:
    """Exchange of some maps between the members of a team.

    Attributes:
        rows: samples of each member.
        ends: of each map, the members that have or get all of its samples, in order.
    """

    comm: TeamComm
    rows: tuple[range, ...]
    forms: tuple[Form, ...]
    ends: tuple[tuple[int, ...], ...]
    device: torch.device

    @property
    def samples(self) -> int:
        return self.rows[-1].stop

    def among(self, numbers: Sequence[int]) -> SampleExchange:
        """Return the exchange of some of the maps."""
        forms, ends = tuple(self.forms[k] for k in numbers), tuple(self.ends[k] for k in numbers)
        return dataclasses.replace(self, forms=forms, ends=ends)

    def collect(self, own: Sequence[Tensor], record: bool = True) -> list[Tensor | None]:
        """Return all samples of the maps that this member is an end of; None of others.

        Args:
            own: this member's samples of each.
            record: in a forward pass, which may be recomputed.
        """
        return self._logged(lambda: self._collect(own), record)

    def spread(self, whole: Sequence[Tensor | None], record: bool = True) -> list[Tensor]:
        """Return this member's samples of each map, summed over its ends in their order.

        Args:
            whole: all samples of the maps that this member is an end of.
        """
        return [part for part in self._logged(lambda: self._spread(whole), record) if part is not None]

    def _logged(self, begin: Callable[[], Wait], record: bool) -> list[Tensor | None]:
        log = self.comm.log if record else None
        wait: Wait = begin() if log is None else log.record_or_replay(begin)
        return [None if value is None else value.detach() for value in wait()]

    def _collect(self, own: Sequence[Tensor]) -> Wait:
        member, whole = self.comm.member, list[Tensor | None]()
        sends, receives = list[Message](), list[Message]()
        for value, form, ends in zip(own, self.forms, self.ends, strict=True):
            flat, gathered = form.flat(value), None
            if member in ends:
                gathered = form.empty(self.samples, self.device)
                parts = self._parts(gathered, form)
                parts[member].copy_(flat)
                receives += [(peer, part) for peer, part in enumerate(parts) if peer != member and len(part)]
            sends += [(end, flat) for end in ends if end != member and len(flat)]
            whole.append(gathered)
        arrived = self.comm.swap(sends, receives)

        def wait() -> list[Tensor | None]:
            arrived()
            return whole

        return wait

    def _spread(self, whole: Sequence[Tensor | None]) -> Wait:
        member, pieces = self.comm.member, list[list[Tensor]]()
        sends, receives = list[Message](), list[Message]()
        for value, form, ends in zip(whole, self.forms, self.ends, strict=True):
            parts = [] if value is None else self._parts(form.flat(value), form)
            sends += [(peer, part) for peer, part in enumerate(parts) if peer != member and len(part)]
            pieces.append([])
            for end in ends:
                pieces[-1].append(form.empty(len(self.rows[member]), self.device))
                flat = in_memory_order(pieces[-1][-1])
                if end == member:
                    flat.copy_(parts[member])
                elif len(flat):
                    receives.append((end, flat))
        arrived = self.comm.swap(sends, receives)

        def wait() -> list[Tensor | None]:
            arrived()
            return [functools.reduce(torch.add, each) for each in pieces]

        return wait

    def _parts(self, value: Tensor, form: Form) -> tuple[Tensor, ...]:
        """Return the numbers of each member's samples."""
        return torch.split(in_memory_order(value), [form.size * len(rows) for rows in self.rows])


def fork(exchange: SampleExchange, own: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return all samples of the maps that this member is an end of; of others an empty tensor, by which the join visits
    this exchange in the backward pass, too."""
    whole: tuple[Tensor, ...] = _Fork.apply(exchange, *own)
    return whole


def join(
    exchange: SampleExchange, whole: Sequence[Tensor | None], differentiable: Sequence[bool], forked: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """Return this member's samples of each map.

    Args:
        whole: all samples of those that this member computed.
        differentiable: of each map, whether a gradient flows back through it on the member that computed it.
        forked: what ``fork`` gave.
    """
    # Members without a branch that is trained visit the exchange of gradients, too.
    anchor = torch.zeros((), requires_grad=any(differentiable))
    mine = [value for value in whole if value is not None]
    own: tuple[Tensor, ...] = _Join.apply(exchange, tuple(differentiable), len(mine), anchor, *mine, *forked)
    return own


class _Fork(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchange: SampleExchange, *own: Tensor) -> tuple[Tensor, ...]:
        ctx.exchange = exchange
        ctx.set_materialize_grads(False)
        whole = exchange.collect(own)
        empty = (own[0].new_empty(0) if value is None else value for value in whole)
        return tuple(empty)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        wanted = [k for k, needed in enumerate(ctx.needs_input_grad[1:]) if needed]
        exchange: SampleExchange = ctx.exchange.among(wanted)
        whole: list[Tensor | None] = []
        for k, form, ends in zip(wanted, exchange.forms, exchange.ends, strict=True):
            gradient = gradients[k]
            if exchange.comm.member not in ends:
                gradient = None
            elif gradient is None:
                gradient = form.empty(exchange.samples, exchange.device).zero_()
            whole.append(gradient)
        found = dict(zip(wanted, exchange.spread(whole, record=False), strict=True))
        return None, *(found.get(k) for k in range(len(gradients)))


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        exchange: SampleExchange,
        differentiable: tuple[bool, ...],
        count: int,
        anchor: Tensor,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.exchange, ctx.differentiable, ctx.ties = exchange, differentiable, len(tensors) - count
        values = iter(tensors[:count])
        own = exchange.spread([next(values) if exchange.comm.member in ends else None for ends in exchange.ends])
        ctx.mark_non_differentiable(*(part for part, flows in zip(own, differentiable, strict=True) if not flows))
        return tuple(own)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        exchange: SampleExchange = ctx.exchange
        wanted = [k for k, flows in enumerate(ctx.differentiable) if flows]
        whole = exchange.among(wanted).collect([gradients[k] for k in wanted], record=False)
        found = dict(zip(wanted, whole, strict=True))
        mine = (found.get(k) for k, ends in enumerate(exchange.ends) if exchange.comm.member in ends)
        return None, None, None, None, *mine, *(None for _ in range(ctx.ties))
