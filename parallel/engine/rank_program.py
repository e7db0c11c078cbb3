"""What one rank computes, and with what: the parts that ``assemble`` hands to the engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from parallel.engine.grad_reducer import GradReducer
from parallel.engine.inference import Inference
from parallel.engine.messages import Messenger
from parallel.engine.optimizer_step import OptimizerStep
from parallel.engine.state_dict import FullStateDict
from parallel.engine.transfers import StageTransfers
from parallel.schedule.action import Schedule
from parallel.schedule.placement import Placement
from parallel.schedule.seating import Seating
from parallel.schedule.shares import Shares
from parallel.stage.stage import Stage
from parallel.team.link import TeamLink
from parallel.team.told_waits import ToldWaits


@dataclass(frozen=True)
class RankProgram:
    """All of it.

    Attributes:
        schedule: lowered, of all seats; that of this rank's is walked, the others are shown when something fails.
        scheduled: gives that of other shares of the groups.
        seating: which ranks sit there.
        link: to the others on this rank's seat.
        waits: of the link, for those.
        stages: those this rank holds, by number; two replicas of one stage share it.
        exchanges: of the stages that other ranks hold too.
        inputs: name of the model's input.
        share: microbatches of this rank's group.
        batch: tiles of a usual step over all ranks; where a step has another number it is made good afterwards.
        m: microbatches of a step over all ranks.
    """

    schedule: Schedule
    scheduled: Callable[[Shares], Schedule]
    placement: Placement
    seating: Seating
    stages: Mapping[int, Stage]
    transfers: StageTransfers
    reducers: Mapping[int, GradReducer]
    update: OptimizerStep
    messenger: Messenger
    prediction: Inference
    full_state: FullStateDict
    inputs: str
    share: Sequence[int]
    batch: int
    m: int
    link: TeamLink | None = None
    waits: ToldWaits | None = None

    def of_shares(self, shares: Shares, rank: int) -> RankProgram:
        """Return what ``rank`` computes, with the same parts, once the groups compute ``shares``.

        Raises:
            ValueError: the schedule does not take so many microbatches of a group.
        """
        return replace(self, schedule=self.scheduled(shares), share=shares[self.seating.group_of(rank)])
