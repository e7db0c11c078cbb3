"""One forward pass of one microbatch on one member of a team: its plan, and where its random numbers are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from parallel.offload.rng import drawing
from parallel.team.link import TeamLink
from parallel.team.team_plan import TeamPlan


@dataclass
class Pass:
    """One forward pass of one microbatch on one member.

    Attributes:
        random: seed or state that the next number is drawn from.
    """

    plan: TeamPlan
    link: TeamLink
    device: torch.device
    random: int | Tensor = 0

    def random_state(self) -> Tensor:
        """Return the state that the next stage draws from."""
        if isinstance(self.random, Tensor):
            return self.random
        with drawing(self.random, self.device) as draws:
            pass
        return draws.end

    def drawn(self, draw: Callable[[], Any]) -> Any:
        """Return what ``draw`` gives, which draws as the plain model would."""
        start = self.random
        if (tape := self.link.tape) is not None:
            start = tape.word(lambda: start)
        with drawing(start, self.device) as draws:
            value = draw()
        self.random = draws.end
        return value

    def hear_of_member_0(self) -> None:
        """Go on from the state that member 0, which drew alone, is in."""
        state = self.random_state().to("cpu", torch.int32)  # from host to host: no device is waited for
        said = self.link.sum(state if self.link.member == 0 else torch.zeros_like(state))
        self.random = said.to(torch.uint8)
