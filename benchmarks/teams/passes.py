"""Forward and backward passes on one tile of random px: of a model as it is, and of one member of a team that divides
the tile.

Takes the name of a model and the side of a tile; both ways have the same weights, tile, targets and loss.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.registry import build_model
from parallel.comm.communicator import Communicator
from parallel.graph.partition import Partition
from parallel.space.team import Grid
from parallel.streaming.box_sums import BoxSums
from parallel.team.team_comm import TeamComm
from parallel.team.team_plan import team_plans
from parallel.team.team_stage import TeamStage
from parallel.team.team_stages import team_stages
from parallel.trace.trace import trace_exclusively

CLASSES = 3


class Problem:
    """A model in float32 and one tile, labelled as a whole or px by px.

    Args:
        model: as for ``--model``.
        side: px of the tile.
    """

    def __init__(self, model: str, side: int, dtype: torch.dtype = torch.float32) -> None:
        torch.manual_seed(0)
        self.model: nn.Module = build_model(model, classes=CLASSES).to(dtype).train()
        self.model.to(memory_format=torch.channels_last)  # as app.train does
        self.shape = (1, 3, side, side)
        self.images = torch.randn(self.shape, dtype=dtype).contiguous(memory_format=torch.channels_last)
        with torch.no_grad():
            made = copy.deepcopy(self.model)(torch.zeros(2, 3, 64, 64, dtype=dtype))
        self.labels_px = made.dim() == 4
        self.targets = torch.randint(CLASSES, (1, side, side) if self.labels_px else (1,))

    def plain_pass(self) -> None:
        """Compute gradients of the model as it is."""
        _forget(self.model)
        output = self.model(self.images)
        (_sums(output, self.targets).sum() / self.targets.numel()).backward()

    def member(self, communicator: Communicator, grid: Grid, link: TeamComm | None = None) -> Member:
        """Return this rank's part of the work of a team, whose members talk over ``link``; every rank calls it."""
        model = copy.deepcopy(self.model)
        traced = trace_exclusively(model, self.shape, communicator)
        link = link or TeamComm(communicator)
        partition, plans = Partition(traced.graph, (0,)), team_plans(traced, grid)
        stage = team_stages(traced, partition, [0], grid, link, plans, torch.device("cpu"))[0]
        return Member(self, stage.train(), link)


class Member:
    """One rank of a team that computes the tile of ``problem`` side by side."""

    def __init__(self, problem: Problem, stage: Any, link: TeamComm) -> None:
        assert isinstance(stage, TeamStage)
        self.problem, self.stage, self.link = problem, stage, link

    def one_pass(self) -> None:
        """Compute this member's part of the gradients."""
        _forget(self.stage)
        problem = self.problem
        tiles = self.stage.tiles(problem.images, problem.shape)
        with self.stage.context(problem.shape):
            if problem.labels_px:
                loss = self.stage.sums_in_parts([tiles], BoxSums(_sums, problem.targets))
                assert loss is not None
            else:
                (output,) = self.stage(tiles)
                loss = _sums(output, problem.targets) if self.stage.counts else output
        (loss.sum() * (self.stage.counts / problem.targets.numel())).backward()
        self.link.finish()

    def gradients(self) -> dict[str, Tensor]:
        """Return by name: this member's partial sums."""
        return {name: p.grad for name, p in self.stage.named_parameters() if p.grad is not None}


def _sums(output: Any, targets: Tensor) -> Tensor:
    """Return (n, 1): cross entropy of all that is labelled."""
    return F.cross_entropy(output, targets, reduction="none").flatten(1 if targets.dim() > 1 else 0).sum(-1, True)


def _forget(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = None
