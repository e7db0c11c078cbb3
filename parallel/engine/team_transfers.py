"""Send and receive values and gradients between stages that teams compute, member by member.

``team.routes`` lists what goes from which member to which; a message holds all that goes between two of them. The
gradient of a part returns to its sender; gradients of a value that every member received add up.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from parallel.engine.messages import Form, Incoming, Messenger
from parallel.engine.transfers import Routes, StageTransfers
from parallel.graph.layers import RANDOM_STATE
from parallel.schedule.action import Action
from parallel.schedule.mesh import Mesh
from parallel.stage.stage import Gradients
from parallel.team.routes import Parcel, parcels
from parallel.team.team_plan import TeamPlan

Key = tuple[int, int, int]
"""(source stage, target stage, microbatch)"""


class TeamTransfers(StageTransfers):
    """What lies between two actions of a member of a team.

    Args:
        links: routes that gradients come back along.
        plan_of: (shape of the tiles, in training) -> plan of every stage's team.
    """

    def __init__(
        self,
        routes: Routes,
        links: Mapping[tuple[int, int], bool],
        mesh: Mesh,
        messenger: Messenger,
        rank: int,
        plan_of: Callable[[tuple[int, ...], bool], TeamPlan],
    ) -> None:
        self._mesh, self._member = mesh, mesh.member_of(rank)
        self._plan_of = plan_of
        self._known: dict[Any, list[Parcel]] = {}
        super().__init__(routes, links, mesh, messenger, mesh.team_of(rank))

    def clear(self) -> None:
        super().clear()
        self._pieces: dict[Key, list[tuple[int, list[Parcel], Incoming]]] = {}
        self._sent: dict[Key, list[tuple[int, list[Parcel], Form]]] = {}
        self._had: dict[Key, list[tuple[int, list[Parcel], Form]]] = {}
        self._back: dict[Key, list[tuple[list[Parcel], Incoming]]] = {}
        self._gradients: dict[Key, dict[str, list[Tensor]]] = {}
        self._made: dict[Key, dict[str, list[tuple[Tensor, torch.device]]]] = {}
        """Tensors without data, in the shapes of what was made here, and the devices of what was made."""

    def give(self, action: Action, outputs: Mapping[str, Any]) -> None:
        super().give(action, outputs)
        for target in self.targets[action.stage]:
            if self._links[action.stage, target]:
                names = self._routes[action.stage, target]
                self._made[action.stage, target, action.i] = {name: _like(outputs[name]) for name in names}

    def send(self, action: Action, shape: tuple[int, ...]) -> None:
        assert action.peer is not None
        key = (action.stage, action.peer, action.i)
        values, sent = self._leaving.pop(key), []
        for q, own in self._by_target(key[:2], shape, True).items():
            contents = {parcel.name: values[parcel.name] for parcel in own}
            kind = ("training", *key[:2], action.replica, shape, self._member, q)
            form = self._messenger.send(self._rank_of(action.peer, action, q), kind, contents)
            sent.append((q, own, form.gradient()))
        self._sent[key] = sent

    def post(self, action: Action, shape: tuple[int, ...]) -> None:
        assert action.peer is not None
        key = (action.peer, action.stage, action.i)
        self._pieces[key] = []
        for p, own in self._by_source(key[:2], shape, True).items():
            kind = ("training", *key[:2], action.replica, shape, p, self._member)
            incoming = self._messenger.post(self._rank_of(action.peer, action, p), kind)
            self._pieces[key].append((p, own, incoming))

    def take(self, action: Action) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for source in self.sources[action.stage]:
            key = (source, action.stage, action.i)
            if self._peer(source, action) == self._rank:
                values |= self._leaving.pop(key)
                continue
            values |= dict.fromkeys(self._routes[source, action.stage])
            self._had[key] = []
            for p, own, incoming in self._pieces.pop(key):
                form, tensors = incoming.wait()
                for tensor, told in zip(tensors, form.tensors, strict=True):
                    tensor.requires_grad_(told.needs_grad)
                self._had[key].append((p, own, form.gradient()))
                values |= form.build(tensors)
        return values

    def give_back(self, action: Action, gradients: Gradients) -> None:
        for source in self.sources[action.stage]:
            if self._links[source, action.stage]:
                names = self._routes[source, action.stage]
                own = {name: list(gradients.get(name, ())) for name in names}
                self._gradients[source, action.stage, action.i] = own

    def send_back(self, action: Action) -> None:
        assert action.peer is not None
        key = (action.peer, action.stage, action.i)
        gradients = self._gradients.pop(key)
        for p, own, form in self._had.pop(key):
            tensors = [gradient for parcel in own for gradient in gradients[parcel.name]]
            if form.tensors:
                self._messenger.send_tensors(self._rank_of(action.peer, action, p), tensors, form.tensors)

    def post_back(self, action: Action) -> None:
        assert action.peer is not None
        key = (action.stage, action.peer, action.i)
        self._back[key] = [
            (own, self._messenger.post_tensors(self._rank_of(action.peer, action, q), form))
            for q, own, form in self._sent.pop(key)
            if form.tensors
        ]

    def take_back(self, action: Action) -> Gradients:
        sums: Gradients = {}
        for target in self.targets[action.stage]:
            if not self._links[action.stage, target]:
                continue
            key = (action.stage, target, action.i)
            self._counts.pop(key)
            made = self._made.pop(key)
            if self._peer(target, action) == self._rank:
                arrived = self._gradients.pop(key)
                own = {name: arrived[name] for name in made}
            else:
                own = {name: [torch.zeros_like(each, device=on) for each, on in like] for name, like in made.items()}
                for among, incoming in self._back.pop(key):
                    left = iter(incoming.wait()[1])
                    for parcel in among:
                        for total in own[parcel.name]:
                            total += next(left)
            for name, gradients in own.items():
                if name not in sums:
                    sums[name] = gradients
                    continue
                for total, more in zip(sums[name], gradients, strict=True):
                    total += more
        return sums

    def parcels(self, way: tuple[int, int], shape: tuple[int, ...], training: bool) -> list[Parcel]:
        """Return all that goes between two stages."""
        key = (way, shape, training)
        if key not in self._known:
            names = [name for name in self._routes[way] if training or name != RANDOM_STATE]
            self._known[key] = parcels(names, self._plan_of(shape, training))
        return self._known[key]

    def to_members(
        self, way: tuple[int, int], shape: tuple[int, ...], value: Mapping[str, Any]
    ) -> dict[int, dict[str, Any]]:
        """Return what this member sends along ``way`` in prediction, by member of the team that takes it."""
        by_target = self._by_target(way, shape, False)
        return {q: {parcel.name: value[parcel.name] for parcel in own} for q, own in by_target.items()}

    def post_members(self, way: tuple[int, int], shape: tuple[int, ...], ranks: Sequence[int]) -> list[Incoming]:
        """Begin to receive what comes along ``way`` in prediction from the team of ``ranks``."""
        return [
            self._messenger.post(ranks[p], ("prediction", *way, shape, p, self._member))
            for p in self._by_source(way, shape, False)
        ]

    def from_members(self, way: tuple[int, int], posted: Sequence[Incoming]) -> dict[str, Any]:
        """Return what came."""
        values: dict[str, Any] = dict.fromkeys(self._routes[way])
        for incoming in posted:
            form, tensors = incoming.wait()
            values |= form.build(tensors)
        return values

    def _by_target(self, way: tuple[int, int], shape: tuple[int, ...], training: bool) -> dict[int, list[Parcel]]:
        return _grouped([p for p in self.parcels(way, shape, training) if p.source == self._member], "target")

    def _by_source(self, way: tuple[int, int], shape: tuple[int, ...], training: bool) -> dict[int, list[Parcel]]:
        return _grouped([p for p in self.parcels(way, shape, training) if p.target == self._member], "source")

    def _rank_of(self, stage: int, action: Action, member: int) -> int:
        return self._mesh.ranks_of(self._peer(stage, action))[member]


def _grouped(own: Sequence[Parcel], end: str) -> dict[int, list[Parcel]]:
    found: dict[int, list[Parcel]] = {}
    for parcel in own:
        found.setdefault(getattr(parcel, end), []).append(parcel)
    return found


def _like(value: Any) -> list[tuple[Tensor, torch.device]]:
    """Those tensors of ``value`` that a gradient comes back for, without their data, and their devices."""
    leaves = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor) and leaf.requires_grad]
    return [(torch.empty_like(leaf, device="meta"), leaf.device) for leaf in leaves]
