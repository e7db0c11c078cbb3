"""Values and gradients on their way between the stages of one rank and all others.

A value goes from the stage that makes it straight to each stage that uses it, skips included, and is then freed; within
a rank it goes without a message. Between teams, ``parcels`` lists which member sends what to which, in one message;
a rank alone is a team of one. The gradient of a part returns to its sender; those of a value sent to several add up.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from parallel.engine.messages import Form, Messenger, PendingMessage
from parallel.graph.layers import RANDOM_STATE
from parallel.schedule.action import Action
from parallel.schedule.mesh import Mesh
from parallel.stage.stage import Gradients
from parallel.team.team_plan import Plans, TeamPlan

Routes = Mapping[tuple[int, int], tuple[str, ...]]
"""(source stage, target stage) -> names of the values that go that way."""

Way = tuple[int, int]
Key = tuple[int, int, int | None]
"""(source stage, target stage, microbatch)"""

Names = Mapping[int, tuple[str, ...]]
"""Member of the other team -> names of the values in its message."""


class Parcel(NamedTuple):
    """A value, or a member's part of it, on its way from a member of one team to a member of the next."""

    name: str
    source: int
    target: int


def parcels(names: Iterable[str], plan: TeamPlan) -> list[Parcel]:
    """Return all that goes between two teams of ``plan``, in the order that every member sends and receives it in.

    All teams divide maps alike, so that each member sends its part of a map to the member of the same number. Member 0
    sends what every member has, and what it alone has.
    """
    members, found = range(plan.mesh.grid.members), []
    for name in names:
        place = plan.placement(name)
        if place == "shard":
            found += [Parcel(name, p, p) for p in members if all(span.size > 0 for span in plan.owned(name, p))]
        else:
            everybody = name == RANDOM_STATE or place == "replicate"
            found += [Parcel(name, 0, q) for q in (members if everybody else [0])]
    return found


class StageTransfers:
    """Values, gradients and messages that one rank holds between two actions.

    Args:
        links: routes that gradients come back along.
        plan_of: plans of the teams; None: every stage is computed by one rank.
    """

    def __init__(
        self,
        routes: Routes,
        links: Mapping[Way, bool],
        mesh: Mesh,
        messenger: Messenger,
        rank: int,
        plan_of: Plans | None = None,
    ) -> None:
        self._routes, self._links, self._messenger, self._plan_of = routes, links, messenger, plan_of
        self._rank, self._member = rank, mesh.member_of(rank)
        stages = range(mesh.stages)
        self._ranks = {
            (stage, replica): tuple(mesh.ranks_of(mesh.peer_team(mesh.team_of(rank), stage, replica)))
            for stage in stages
            for replica in range(mesh.replicas)
        }
        self._sources = {stage: tuple(s for s in stages if (s, stage) in routes) for stage in stages}
        self._targets = {stage: tuple(t for t in stages if (stage, t) in routes) for stage in stages}
        self._known: dict[Any, Names] = {}
        self.clear()

    def clear(self) -> None:
        """Forget everything, after a step that was given up."""
        self._values: dict[Key, dict[str, Any]] = {}
        self._incoming: dict[Key, list[tuple[int, tuple[str, ...], PendingMessage]]] = {}
        self._sent: dict[Key, list[tuple[int, tuple[str, ...], Form]]] = {}
        self._received: dict[Key, list[tuple[int, tuple[str, ...], Form]]] = {}
        self._gradients: dict[Key, dict[str, list[Tensor]]] = {}
        self._incoming_back: dict[Key, list[tuple[tuple[str, ...], PendingMessage]]] = {}
        self._made: dict[Key, dict[str, list[tuple[Tensor, torch.device]]]] = {}
        """Tensors without data, in the shapes of what was made here, and the devices of what was made."""

    def stash_output(
        self, action: Action, outputs: Mapping[str, Any], training: bool = True, gradients: bool = True
    ) -> None:
        """Take over what the forward pass ``action`` made for other stages; what only training makes may be missing.

        Args:
            gradients: come back for it.
        """
        source, ranks = action.stage, self._ranks
        for target in self._targets[source]:
            key, way = (source, target, action.microbatch), (source, target)
            value = {name: outputs.get(name) for name in self._routes[way] if training or name != RANDOM_STATE}
            if gradients and self._links[way]:
                self._made[key] = {name: _like(part) for name, part in value.items()}
            if self._rank in ranks[target, action.replica]:
                value = tree_map(_handed_over, value)
            self._values[key] = value

    def send_forward(
        self, action: Action, shape: tuple[int, ...], training: bool = True, gradients: bool = True
    ) -> None:
        """Begin to send to ``action.peer`` what it uses of a microbatch of ``shape``."""
        way, key, ranks = self._way(action, outward=True)
        values, sent = self._values.pop(key), []
        for q, names in self._names(way, shape, training, incoming=False).items():
            kind = (training, gradients, *way, action.replica, shape, self._member, q)
            form = self._messenger.send(ranks[q], kind, {name: values[name] for name in names})
            sent.append((q, names, form.gradient()))
        if gradients:
            self._sent[key] = sent

    def recv_forward(
        self, action: Action, shape: tuple[int, ...], training: bool = True, gradients: bool = True
    ) -> None:
        """Begin to receive from ``action.peer``."""
        way, key, ranks = self._way(action, outward=False)
        kind = (training, gradients, *way, action.replica, shape)
        self._incoming[key] = [
            (p, names, self._messenger.post(ranks[p], (*kind, p, self._member)))
            for p, names in self._names(way, shape, training, incoming=True).items()
        ]

    def wait_forward(self, action: Action, gradients: bool = True) -> dict[str, Any]:
        """Return the values that the forward pass ``action`` uses, waited for; their tensors are leaves."""
        target, values = action.stage, dict[str, Any]()
        for source in self._sources[target]:
            key = (source, target, action.microbatch)
            if self._rank in self._ranks[source, action.replica]:
                values |= self._values.pop(key)
                continue
            values |= dict.fromkeys(self._routes[source, target])
            received = []
            for p, names, incoming in self._incoming.pop(key, ()):
                form, tensors = incoming.wait()
                for tensor, told in zip(tensors, form.tensors, strict=True):
                    tensor.requires_grad_(told.needs_grad)
                received.append((p, names, form.gradient()))
                values |= form.build(tensors)
            if gradients:
                self._received[key] = received
        return values

    def stash_gradients(self, action: Action, gradients: Gradients) -> None:
        """Take over the gradients that the backward pass ``action`` made of what came in."""
        for source in self._sources[action.stage]:
            way = (source, action.stage)
            if self._links[way]:
                own = {name: list(gradients.get(name, ())) for name in self._routes[way]}
                self._gradients[source, action.stage, action.microbatch] = own

    def send_backward(self, action: Action) -> None:
        """Begin to send to ``action.peer`` the gradients of what it had sent."""
        _, key, ranks = self._way(action, outward=False)
        gradients = self._gradients.pop(key)
        for p, names, form in self._received.pop(key):
            if form.tensors:
                tensors = [gradient for name in names for gradient in gradients[name]]
                self._messenger.send_tensors(ranks[p], tensors, form.tensors)

    def recv_backward(self, action: Action) -> None:
        """Begin to receive, from ``action.peer``, the gradients of what was sent to it."""
        _, key, ranks = self._way(action, outward=True)
        self._incoming_back[key] = [
            (names, self._messenger.post(ranks[q], form=form)) for q, names, form in self._sent.pop(key) if form.tensors
        ]

    def wait_backward(self, action: Action) -> Gradients:
        """Return the gradients of what stage ``action.stage`` gave, summed over the stages that used it."""
        source, sums = action.stage, Gradients()
        for target in self._targets[source]:
            if not self._links[source, target]:
                continue
            key = (source, target, action.microbatch)
            made, own = self._made.pop(key), Gradients()
            if self._rank in self._ranks[target, action.replica]:
                arrived = self._gradients.pop(key)
                own = {name: arrived[name] for name in made}
            else:
                for names, incoming in self._incoming_back.pop(key):
                    tensors = iter(incoming.wait()[1])
                    for name in names:
                        _add(own, name, list(itertools.islice(tensors, len(made[name]))))
            for name, like in made.items():
                _add(sums, name, own.get(name) or [torch.zeros_like(each, device=on) for each, on in like])
        return sums

    def _way(self, action: Action, *, outward: bool) -> tuple[Way, Key, tuple[int, ...]]:
        """Return the way and key of what ``action.stage`` exchanges with ``action.peer``, and the ranks of the peer."""
        assert action.peer is not None
        way = (action.stage, action.peer) if outward else (action.peer, action.stage)
        return way, (*way, action.microbatch), self._ranks[action.peer, action.replica]

    def _names(self, way: Way, shape: tuple[int, ...], training: bool, incoming: bool) -> Names:
        """Return what goes along ``way`` between this member and those of the other team."""
        key = way, self._plan_of and shape, training, incoming
        if key not in self._known:
            names = tuple(name for name in self._routes[way] if training or name != RANDOM_STATE)
            found: dict[int, tuple[str, ...]] = {} if self._plan_of else {0: names}
            for parcel in parcels(names, self._plan_of(shape, training)) if self._plan_of else ():
                own, other = (parcel.target, parcel.source) if incoming else (parcel.source, parcel.target)
                if own == self._member:
                    found[other] = (*found.get(other, ()), parcel.name)
            self._known[key] = found
        return self._known[key]


def _add(sums: Gradients, name: str, gradients: list[Tensor]) -> None:
    # Several values may have the same tensor as a gradient: nothing is added in place.
    before = sums.get(name)
    sums[name] = gradients if before is None else [total + more for total, more in zip(before, gradients, strict=True)]


def _like(value: Any) -> list[tuple[Tensor, torch.device]]:
    """Return those tensors of ``value`` that a gradient comes back for, without their data, and their devices."""
    leaves = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor) and leaf.requires_grad]
    return [(torch.empty_like(leaf, device="meta"), leaf.device) for leaf in leaves]


def _handed_over(leaf: Any) -> Any:
    """Return a tensor cut off from the graph that made it, asking for a gradient as it did."""
    return leaf.detach().requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf
