"""A model computed box by box by a rank alone, which is called as the model itself."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from parallel.comm.thread_comm import LocalCommunicator
from parallel.graph.partition import Partition
from parallel.offload.host_memory import HostMemory
from parallel.offload.rng import get_random_state, set_random_state
from parallel.space.team import TeamGrid
from parallel.streaming.read_region import NothingTileable
from parallel.team.boxed_nodes import PlannedRegion
from parallel.team.team_comm import TeamComm
from parallel.team.team_plan import BoxedParts, plan_alone
from parallel.team.team_stage import TeamStage
from parallel.team.team_stages import team_stages
from parallel.trace.trace import trace_exclusively


class BoxedModel(TeamStage):
    """The only stage of a model. It draws from torch's own generators."""

    _under_way = False

    def forward(self, *values: Any) -> Any:
        """Return the model's output."""
        if self._under_way:
            return super().forward(*values)
        self._under_way = True
        try:
            with self.context(tuple(values[0].shape), get_random_state(self.device)) as context:
                value = super().forward(*values)[0]
        finally:
            self._under_way = False
        set_random_state(context.end, self.device)
        return value


def streamed(
    module: nn.Module, box: int, shape: tuple[int, ...], stored_bytes: int | None = None, host: HostMemory | None = None
) -> BoxedModel:
    """Return ``module`` computed in boxes of ``box`` px, with the names it has.

    Args:
        shape: (n, 3, h, w) of a usual microbatch; others may follow.
        stored_bytes, host: as for ``RegionRun``.

    Raises:
        ValueError: the model cannot be traced, or nothing of it be computed in boxes.
    """
    parameter, traced = next(module.parameters()), trace_exclusively(module, shape, LocalCommunicator())
    comm, plans, boxed = (
        TeamComm(LocalCommunicator()),
        functools.lru_cache(plan_alone),
        BoxedParts(box, stored_bytes, host),
    )
    whole = Partition(traced.graph, (0,))
    stage = team_stages(traced, whole, [0], TeamGrid(), comm, plans, parameter.device, boxed=boxed)[0]
    stage.__class__ = BoxedModel
    assert isinstance(stage, BoxedModel)
    stage.train()
    images: Tensor = torch.zeros((), dtype=parameter.dtype.to_real(), device=parameter.device).expand(shape)
    run: Any = stage._run_training
    planned = run.planned(stage, plans(shape, True), (images,))
    if isinstance(planned, NothingTileable):
        raise planned
    stage.train(module.training)
    return stage


def planned_regions(
    stage: nn.Module, shape: tuple[int, ...], training: bool = True
) -> list[PlannedRegion | NothingTileable]:
    """Return what a stage has in boxes for tiles of ``shape``, of maps and of sums, in the order of their planning."""
    assert isinstance(stage, TeamStage)
    run: Any = stage._run_training if training else stage._run_evaluation
    compiled = stage.plans(shape, training).compiled.items()
    return [planned for key, planned in compiled if isinstance(key, tuple) and key[0] is run]
