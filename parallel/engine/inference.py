"""Prediction over stages: the forward passes of replica 0, one microbatch after the other, in evaluation mode.

Takes the images on the rank of the first stage; gives the output on the rank of the last. Stages are taken in
ascending order on every rank, which cannot deadlock because values flow to later stages only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_map

from parallel.engine.messages import Messenger
from parallel.engine.step import Microbatch, Wants, measured
from parallel.engine.team_transfers import TeamTransfers
from parallel.engine.transfers import Routes, StageTransfers
from parallel.graph.layers import RANDOM_STATE
from parallel.schedule.mesh import Mesh
from parallel.stage.stage import Stage
from parallel.streaming.box_sums import BoxSums, Sums
from parallel.streaming.images import Boxes, whole
from parallel.streaming.streamed_module import StreamedStage
from parallel.team.team_stage import TeamStage
from parallel.trace.stage_module import StageModule


class Inference:
    """The stages of replica 0 that one rank holds.

    Args:
        inputs: name of the model's input.
    """

    def __init__(
        self,
        stages: Mapping[int, Stage],
        routes: Routes,
        mesh: Mesh,
        messenger: Messenger,
        rank: int,
        inputs: str,
        transfers: StageTransfers,
    ) -> None:
        team = mesh.team_of(rank)
        self._team = transfers if isinstance(transfers, TeamTransfers) else None
        self._member, self._mesh = mesh.member_of(rank), mesh
        self._stages = {n: stages[n] for n, replica in mesh.held_by(team) if not replica}
        self._last = mesh.stages - 1
        self._inputs = inputs
        self._messenger = messenger
        group = team // mesh.depth
        owners = {stage: mesh.team_at(stage, 0, group) for stage in range(mesh.stages)}
        names = {way: tuple(name for name in route if name != RANDOM_STATE) for way, route in routes.items()}
        self._leaving = {(s, t): names[s, t] for s, t in sorted(names) if owners[s] == team and names[s, t]}
        self._arriving = {(s, t): owners[s] for s, t in sorted(names) if owners[t] == team and names[s, t]}
        self._owners = owners
        self._own_team = team

    @property
    def wants(self) -> Wants:
        """Images to feed the first stage, targets to hold against what the last gives."""
        return Wants(0 in self._stages, self._last in self._stages)

    def run(self, microbatch: Microbatch, sums: Sums | None = None) -> Any:
        """The output of the model in float32 on the rank of the last stage, or ``sums`` of it and the targets; None on
        the others."""
        shape, output = microbatch.shape, None
        here: dict[tuple[int, int], dict[str, Any]] = {}
        posted: dict[tuple[int, int], Any] = {}
        for number, stage in sorted(self._stages.items()):
            values: dict[str, Any] = {}
            if number == 0:
                assert microbatch.images is not None
                stage.module.eval()
                values[self._inputs] = tiles_for(stage.module, microbatch.images, shape)
            for way in self._arriving:
                if way[1] == number:
                    here_too = self._arriving[way] == self._own_team
                    values |= here.pop(way) if here_too else self._receive(way, shape, posted)
            stage.module.eval()
            asked = None
            if sums is not None and number == self._last and isinstance(stage.module, (StreamedStage, TeamStage)):
                assert microbatch.targets is not None
                asked = BoxSums(sums, microbatch.targets)
            outputs = stage.predict(values, asked, shape)
            for way, names in self._leaving.items():
                if way[0] == number:
                    # What only training makes is None here.
                    value = {name: outputs.get(name) for name in names}
                    if self._owners[way[1]] == self._own_team:
                        here[way] = value
                    else:
                        self._send(way, shape, value)
            if number == self._last and not self._member:
                (output,) = outputs.values()
                if asked is None:
                    output = measured(tree_map(_in_float32, output), microbatch, sums)
        self._messenger.finish()
        return output

    def _send(self, way: tuple[int, int], shape: tuple[int, ...], value: Mapping[str, Any]) -> None:
        if self._team is None:
            self._messenger.send(self._mesh.ranks_of(self._owners[way[1]])[0], ("prediction", *way, shape), value)
            return
        for q, contents in self._team.to_members(way, shape, value).items():
            peer = self._mesh.ranks_of(self._owners[way[1]])[q]
            self._messenger.send(peer, ("prediction", *way, shape, self._member, q), contents)

    def _receive(
        self, way: tuple[int, int], shape: tuple[int, ...], posted: dict[tuple[int, int], Any]
    ) -> dict[str, Any]:
        """The value that comes ``way``. Whatever the same rank sends before it is asked for first."""
        for earlier, team in self._arriving.items():
            if team == self._arriving[way] and earlier not in posted and earlier <= way:
                ranks = self._mesh.ranks_of(team)
                if self._team is not None:
                    posted[earlier] = self._team.post_members(earlier, shape, ranks)
                else:
                    posted[earlier] = self._messenger.post(ranks[0], ("prediction", *earlier, shape))
        if self._team is not None:
            return self._team.from_members(way, posted[way])
        form, tensors = posted[way].wait()
        value: dict[str, Any] = form.build(tensors)
        return value


def _in_float32(leaf: Any) -> Any:
    return leaf.float() if isinstance(leaf, Tensor) else leaf


def tiles_for(module: StageModule, images: Tensor | Boxes, shape: tuple[int, ...]) -> Any:
    """Return tiles as the first stage takes them: by boxes, a member's part of them, or whole."""
    if isinstance(module, TeamStage):
        return module.own_tiles(images, shape)
    return images if isinstance(module, StreamedStage) else whole(images)
