"""What one rank computes, and with what: the parts that ``assemble`` hands to the engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from parallel.comm.grad_reducer import GradReducer
from parallel.engine.inference import Inference
from parallel.engine.messages import Messenger
from parallel.engine.optimizer_step import OptimizerStep
from parallel.engine.state_dict import FullStateDict
from parallel.engine.transfers import StageTransfers
from parallel.schedule.action import Action, Kind, Schedule
from parallel.schedule.mesh import Mesh
from parallel.schedule.shares import Shares
from parallel.stage.stage import Stage
from parallel.team.team_comm import TeamComm


@dataclass(frozen=True)
class RankProgram:
    """All of it.

    Attributes:
        schedule: lowered, of all teams; that of this rank's is walked, the others are shown when something fails.
        scheduled: gives that of other shares of the groups.
        mesh: of these teams.
        link: to the others of this rank's team.
        stages: those this rank holds, by number; two replicas of one stage share it.
        exchanges: of the stages that other ranks hold too.
        inputs: name of the model's input.
        share: microbatches of this rank's group.
        batch: tiles of a usual step over all ranks; where a step has another number it is made good afterwards.
        m: microbatches of a step over all ranks.
    """

    schedule: Schedule
    scheduled: Callable[[Shares], Schedule]
    mesh: Mesh
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
    link: TeamComm | None = None

    def of_shares(self, shares: Shares, rank: int) -> RankProgram:
        """Return what ``rank`` computes, with the same parts, once the groups compute ``shares``.

        Raises:
            ValueError: the schedule does not take so many microbatches of a group.
        """
        return replace(self, schedule=self.scheduled(shares), share=shares[self.mesh.group_of(rank)])


def completing_backwards(actions: tuple[Action, ...]) -> Iterator[int]:
    """Positions of the backward passes after which nothing but messages comes before the stage's REDUCE: its gradients
    can be summed while it still runs, without overtaking the sum of another stage."""
    computing: int | None = None
    for position, action in enumerate(actions):
        if action.kind is Kind.REDUCE:
            if computing is not None and actions[computing].stage == action.stage:
                yield computing
            computing = None
        elif action.kind is Kind.BACKWARD:
            computing = position
        elif action.kind in (Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT, Kind.RECOMPUTE):
            computing = None


def last_backwards(actions: tuple[Action, ...]) -> Iterator[int]:
    """Positions of the backward passes that are their stage's last: gradients that stay on this rank are final as soon
    as one adds to them. None of a stage with gradients of parameters that come after backward passes."""
    split = {action.stage for action in actions if action.kind is Kind.BACKWARD_WEIGHT}
    whole = ((a.stage, position) for position, a in enumerate(actions) if a.kind is Kind.BACKWARD)
    yield from sorted({stage: position for stage, position in whole if stage not in split}.values())
