"""Program of one rank: its actions, its stages, and everything else that ``assemble`` hands to the engine.

Running statistics are of layers that different groups of ranks hold: shared layers, and branches of one member alone.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Literal

from torch import nn

from parallel.comm.communicator import Communicator
from parallel.comm.grad_reducer import GradReducer
from parallel.comm.thread_comm import LocalCommunicator
from parallel.engine.messages import Messenger
from parallel.engine.optimizer_step import OptimizerStep
from parallel.engine.parameter_server import ParameterServer
from parallel.engine.state_dict import FullStateDict
from parallel.engine.transfers import StageTransfers
from parallel.schedule.action import COMPUTE, Action, Kind, Schedule
from parallel.schedule.mesh import Mesh
from parallel.schedule.shares import Shares
from parallel.stage.batchnorm import RunningStatistics, running_statistics
from parallel.stage.stage import Stage
from parallel.team.team_comm import TeamComm
from parallel.trace.stage_module import StageModule
from parallel.trace.updated_search import tracking_layers


class JointStatistics(RunningStatistics):
    """Running statistics of several parts of a module, each updated by the ranks that hold it."""

    def __init__(self, parts: Sequence[RunningStatistics]) -> None:
        self._parts = parts

    def begin_step(self, m: int) -> None:
        for part in self._parts:
            part.begin_step(m)

    @contextmanager
    def frozen(self, within: Container[nn.Module] | None = None) -> Iterator[None]:
        with ExitStack() as scopes:
            for part in self._parts:
                scopes.enter_context(part.frozen(within))
            yield

    @contextmanager
    def microbatch(self, i: int) -> Iterator[None]:
        with ExitStack() as scopes:
            for part in self._parts:
                scopes.enter_context(part.microbatch(i))
            yield

    def rollback(self) -> None:
        for part in self._parts:
            part.rollback()

    def end_step(self) -> None:
        for part in self._parts:
            part.end_step()


def statistics_of_stage(
    stage: StageModule, ranks: Communicator, peers: Communicator, mode: Literal["per-microbatch", "deferred"]
) -> RunningStatistics:
    """Return the running statistics of a stage.

    Args:
        ranks: that hold a copy of what is not this member's own.
        peers: that hold a copy of what is, ``StageModule.of_one_member``.

    Raises:
        ValueError: as of ``running_statistics``.
    """
    if not stage.of_one_member:
        return running_statistics(stage, ranks, mode, stage.counts)
    buffers = {id(buffer) for name, buffer in stage.named_buffers() if name in stage.of_one_member}
    own, shared = nn.ModuleList(), nn.ModuleList()
    for layer in tracking_layers(stage):
        (own if id(layer.running_mean) in buffers else shared).append(layer)
    return JointStatistics(
        [running_statistics(shared, ranks, mode, stage.counts), running_statistics(own, peers, mode)]
    )


@dataclass(frozen=True)
class RankProgram:
    """Everything that one rank needs to run a step.

    Attributes:
        schedule: lowered, of all teams; that of this rank's is walked, the others are shown when something fails.
        scheduled: gives that of other shares of the groups.
        mesh: of these teams.
        link: to the others of this rank's team.
        stages: those this rank holds, by number; two replicas of one stage share it.
        reducers: of the stages that other ranks hold too.
        prediction: what this rank does in a prediction: forward passes of one microbatch by replica 0, and messages.
        inputs: name of the model's input.
        share: microbatches of this rank's group.
        batch: tiles of a usual step over all ranks, or of one update of asynchronous SGD; where a step has another
            number it is made good afterwards.
        m: microbatches of a step over all ranks.
        server: of asynchronous SGD, on rank 0.
    """

    schedule: Schedule
    scheduled: Callable[[Shares], Schedule]
    mesh: Mesh
    stages: Mapping[int, Stage]
    transfers: StageTransfers
    reducers: Mapping[int, GradReducer]
    update: OptimizerStep
    messenger: Messenger
    prediction: Sequence[Action]
    full_state: FullStateDict
    inputs: str
    share: Sequence[int]
    batch: int
    m: int
    link: TeamComm | None = None
    server: ParameterServer | None = None

    def of_shares(self, shares: Shares, rank: int) -> RankProgram:
        """Return what ``rank`` computes, with the same parts, once the groups compute ``shares``.

        Raises:
            ValueError: the schedule does not take so many microbatches of a group.
        """
        return replace(self, schedule=self.scheduled(shares), share=shares[self.mesh.group_of(rank)])


def completing_backwards(actions: tuple[Action, ...]) -> Iterator[int]:
    """Yield the positions of backward passes that the stage's REDUCE follows, with nothing but messages in between:
    gradients can be summed during such a pass, without overtaking the sum of another stage; none of a stage whose
    backward pass is split."""
    computing: int | None = None
    split = _split_stages(actions)
    for position, action in enumerate(actions):
        if action.kind is Kind.REDUCE:
            if computing is not None and actions[computing].stage == action.stage:
                yield computing
            computing = None
        elif action.kind in COMPUTE:
            computing = position if action.kind is Kind.BACKWARD and action.stage not in split else None


def last_backwards(actions: tuple[Action, ...]) -> Iterator[int]:
    """Yield the positions of each stage's last backward pass, during which gradients that stay on this rank become
    final; none of a stage whose backward pass is split."""
    split = _split_stages(actions)
    whole = ((a.stage, position) for position, a in enumerate(actions) if a.kind is Kind.BACKWARD)
    yield from sorted({stage: position for stage, position in whole if stage not in split}.values())


def _split_stages(actions: tuple[Action, ...]) -> set[int]:
    return {action.stage for action in actions if action.kind is Kind.BACKWARD_WEIGHT}


class StageGroups:
    """Communicators of the ranks that hold copies of this rank's stages. Every rank makes one at the same time.

    Args:
        peers: also make those of the members of one number in all teams, of a mesh of one stage.

    Attributes:
        of_stage: communicator of all ranks that hold a stage, by stage.
        team: of the ranks of this rank's team.
        peers: of the ranks with this rank's number in their teams: what members hold alone, they have a copy of.
    """

    def __init__(self, communicator: Communicator, mesh: Mesh, *, peers: bool = False) -> None:
        self._communicator = communicator
        self._made: dict[tuple[int, ...], Communicator | None] = {}
        self.of_stage: dict[int, Communicator] = {}
        self.team: Communicator = LocalCommunicator()
        self.peers: Communicator = LocalCommunicator()
        self._alone = mesh.depth == 1 and mesh.members == 1  # no message meets a sum
        for stage in range(mesh.stages):
            if (ranks := self._among(mesh.ranks_with(stage))) is not None:
                self.of_stage[stage] = ranks
        for team in range(mesh.teams if mesh.members > 1 else 0):
            # Its own, where it is also that of a stage: sums of gradients come between those of passes.
            if (ranks := communicator.subgroup(tuple(mesh.ranks_of(team)))) is not None:
                self.team = ranks
        for member in range(mesh.members if peers else 0):
            if (ranks := self._among([mesh.ranks_of(team)[member] for team in range(mesh.teams)])) is not None:
                self.peers = ranks

    def _among(self, ranks: Sequence[int]) -> Communicator | None:
        """Return the communicator of ``ranks``; made once, by all ranks of the run, also by those outside it."""
        key = tuple(ranks)
        if key not in self._made:
            inside = self._communicator.rank in key
            if self._alone and len(key) == self._communicator.world:
                self._made[key] = self._communicator
            elif len(key) > 1:
                self._made[key] = self._communicator.subgroup(key)
            else:
                self._made[key] = LocalCommunicator() if inside else None
        return self._made[key]
