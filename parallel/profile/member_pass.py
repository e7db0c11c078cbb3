"""A pass of a member of a team beside the same work without one: what an exchange costs members that compute.

Takes a team's communicator; gives both passes, of a small net of convolutions and norms on this member's part of a
tile. What lies between them are the exchanges, with all that a rank does for one: rows packed and put together, rims
computed again, cores that hand messages on while they are wanted for computing, and waiting for who is behind.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from parallel.comm.communicator import Communicator
from parallel.graph.partition import Partition
from parallel.space.team import Grid
from parallel.team.team_comm import TeamComm
from parallel.team.team_plan import TeamPlans
from parallel.team.team_stage import TeamStage, team_stages
from parallel.trace.trace_alone import trace_alone

LAYERS, CHANNELS = 8, 64
PART = 32, 64
"""Rows and columns of a member's part: a convolution of some milliseconds."""
CPU = torch.device("cpu")


class MemberPass:
    """One member of a team that divides the rows of a tile.

    Args:
        team: its communicator, of two members or more.
    """

    def __init__(self, team: Communicator) -> None:
        shape = (1, 3, PART[0] * team.world, PART[1])
        self._shape = shape
        self._net = _net().to(memory_format=torch.channels_last).train()
        self._link = TeamComm(team)
        traced = trace_alone(copy.deepcopy(self._net), shape, team)
        partition, plans = Partition(traced.graph, (0,)), TeamPlans(traced)
        stage: Any = team_stages(traced, partition, {0: Grid(team.world, 1)}, self._link, plans, CPU)[0]
        assert isinstance(stage, TeamStage)
        self._stage: TeamStage = stage
        stage.train()
        self._part = torch.randn((1, 3, *PART)).to(memory_format=torch.channels_last)

    def alone(self) -> None:
        """Compute forward and backward of this member's part, which nobody else has a part of."""
        _backward(self._net(self._part).sum())

    def in_team(self) -> int:
        """Compute it as a member; return how many exchanges that took."""
        before = self._link.exchanges
        with self._stage.microbatch(self._shape):
            (output,) = self._stage(self._part)
            loss = output.sum() * self._stage.counted
        _backward(loss)
        self._link.finish()
        return self._link.exchanges - before


def _backward(loss: Tensor) -> None:
    loss.backward()  # type: ignore[no-untyped-call]


def _net() -> nn.Sequential:
    layers: list[nn.Module] = []
    for before in (3, *(CHANNELS,) * (LAYERS - 1)):
        layers += [nn.Conv2d(before, CHANNELS, 3, padding=1, bias=False), nn.BatchNorm2d(CHANNELS), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(CHANNELS, 2))
