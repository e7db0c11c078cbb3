"""One forward pass on one rank of a spatial team: its plan, its RNG state, and sums over the ranks with gradients.

L is the sum of what each member computes of it. So the gradient of a sum is the sum of the members' gradients of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from parallel.offload.rng import drawing
from parallel.team.team_comm import TeamComm
from parallel.team.team_plan import TeamPlan


@dataclass
class ForwardContext:
    """One forward pass of one microbatch on one member.

    Attributes:
        random: seed or state that the next number is drawn from.
    """

    plan: TeamPlan
    comm: TeamComm
    device: torch.device
    random: int | Tensor = 0

    @property
    def end(self) -> Tensor:
        """Return the state that the next stage draws from."""
        if isinstance(self.random, Tensor):
            return self.random
        with drawing(self.random, self.device) as draws:
            pass
        return draws.end

    def run_with_rng(self, draw: Callable[[], Any]) -> Any:
        """Return what ``draw`` gives, which draws as the plain model would."""
        start = self.random
        if (log := self.comm.log) is not None:
            start = log.record_or_replay(lambda: start)
        with drawing(start, self.device) as draws:
            value = draw()
        self.random = draws.end
        return value

    def broadcast_rng_from_rank0(self) -> None:
        """Set the RNG state to member 0's, which has drawn numbers that the others have not."""
        state = self.end.to("cpu", torch.int32)  # from host to host: no device is waited for
        state = self.comm.all_reduce(state if self.comm.member == 0 else torch.zeros_like(state))
        self.random = state.to(torch.uint8)


def all_reduce_sum(comm: TeamComm, value: Tensor) -> Tensor:
    """Return the sum of all members' values."""
    total: Tensor = _Total.apply(value, comm.all_reduce(value), comm)
    return total


def identity_fwd_all_reduce_bwd(comm: TeamComm, value: Tensor) -> Tensor:
    """Return ``value``, which is replicated; backward all-reduces its gradient."""
    echo: Tensor = _Total.apply(value, value, comm)
    return echo


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, total: Tensor, comm: TeamComm) -> Tensor:
        ctx.comm = comm
        return total.clone()  # what follows may change it in place, as dropout does, and a log keeps it

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return ctx.comm.all_reduce(gradients[0], False), None, None


def empty_with_zero_grad(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return an empty tensor that depends on ``tensors``: backward gives them zeros, so that this member visits the
    same sums and exchanges as member 0."""
    if not tensors:
        return torch.empty(0, device=device)
    nothing: Tensor = _Empty.apply(*tensors)
    return nothing


class _Empty(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> Tensor:
        ctx.forms = [(tensor.shape, tensor.dtype, tensor.device) for tensor in tensors]
        return torch.empty(0, dtype=tensors[0].dtype, device=tensors[0].device)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return tuple(torch.zeros((), dtype=dtype, device=device).expand(shape) for shape, dtype, device in ctx.forms)
