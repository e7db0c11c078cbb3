"""The optimiser step of one rank: over the stages it holds, or over those it owns when pairs share the optimizer state.

With inverted replicas ranks k and D-1-k hold the same two stages. Sharded, each keeps the optimizer state of one of
them, updates it, and gives the other rank the result: the same numbers at half the state (Rajbhandari et al. 2020,
ZeRO stage 1, between two ranks).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim import Optimizer

from parallel.comm.communicator import Communicator
from parallel.comm.objects import broadcast_tensors
from parallel.step import set_learning_rate

MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]


@dataclass(frozen=True)
class Copy:
    """Parameters that one rank of a pair updates for both.

    Attributes:
        pair: the two ranks.
        source: number in ``pair`` of the rank that updates.
    """

    parameters: Sequence[nn.Parameter]
    pair: Communicator
    source: int


class Update:
    """Zeroes gradients before a step and updates parameters after it.

    Args:
        owned: parameters that this rank updates, by name.
        unshared: parameters whose gradients stay on this rank; those of shared ones are zeroed by their exchange.
        held: all parameters this rank holds.
        copies: made after the update, in the same order on both ranks of a pair.
    """

    def __init__(
        self,
        make_optimizer: MakeOptimizer,
        *,
        owned: Mapping[str, nn.Parameter],
        unshared: Iterable[nn.Parameter],
        held: Iterable[nn.Parameter],
        copies: Sequence[Copy] = (),
    ) -> None:
        self.owned = dict(owned)
        self.optimizer = make_optimizer(list(owned.values())) if owned else None
        self._unshared = tuple(unshared)
        self._held = tuple(held)
        self._copies = tuple(copies)

    def begin_step(self) -> None:
        for parameter in self._unshared:
            parameter.grad = None

    @torch.no_grad()
    def apply(self, learning_rate: float, scale: float) -> None:
        """Update, after the gradients have been summed.

        Args:
            scale: what the gradients are multiplied with; 1 in the usual step.
        """
        gradients = [parameter.grad for parameter in self._held if parameter.grad is not None]
        if scale != 1 and gradients:
            torch._foreach_mul_(gradients, scale)
        if self.optimizer is not None:
            set_learning_rate(self.optimizer, learning_rate)
            self.optimizer.step()
        for copy in self._copies:
            broadcast_tensors(copy.pair, copy.parameters, copy.source)
