"""Values and gradients on their way between the stages of one rank and all others.

A value goes from the stage that makes it straight to each stage that uses it, skips included, and is let go of once it
is there. Between stages of the same rank it is handed over without a message.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from parallel.engine.messages import Form, Incoming, Messenger, take_apart
from parallel.schedule.action import Action
from parallel.schedule.mesh import Mesh
from parallel.stage.stage import Gradients

Routes = Mapping[tuple[int, int], tuple[str, ...]]
"""(source stage, target stage) -> names of the values that go that way."""


class StageTransfers:
    """What lies between two actions of a rank.

    Args:
        links: routes that gradients come back along.
    """

    def __init__(
        self,
        routes: Routes,
        links: Mapping[tuple[int, int], bool],
        mesh: Mesh,
        messenger: Messenger,
        rank: int,
    ) -> None:
        self._routes = routes
        self._links = links
        self._mesh = mesh
        self._rank = rank
        self._messenger = messenger
        stages = range(mesh.stages)
        self.sources = {stage: tuple(s for s in stages if (s, stage) in routes) for stage in stages}
        self.targets = {stage: tuple(t for t in stages if (stage, t) in routes) for stage in stages}
        self.clear()

    def clear(self) -> None:
        """Forget everything, after a step that was given up. Keys: (source, target, microbatch)."""
        self._leaving: dict[tuple[int, int, int], dict[str, Any]] = {}
        self._arriving: dict[tuple[int, int, int], Incoming] = {}
        self._counts: dict[tuple[int, int, int], dict[str, int]] = {}
        self._forms: dict[tuple[int, int, int], Form] = {}
        self._leaving_back: dict[tuple[int, int, int], list[Tensor]] = {}
        self._arriving_back: dict[tuple[int, int, int], Incoming] = {}

    def give(self, action: Action, outputs: Mapping[str, Any]) -> None:
        """Take over what the forward pass ``action`` made for other stages."""
        i, source = action.i, action.stage
        for target in self.targets[source]:
            value = {name: outputs[name] for name in self._routes[source, target]}
            if self._links[source, target]:
                self._counts[source, target, i] = {name: _asking(part) for name, part in value.items()}
            if self._peer(target, action) == self._rank:
                value = tree_map(_handed_over, value)
            self._leaving[source, target, i] = value

    def send(self, action: Action, shape: tuple[int, ...]) -> None:
        """Begin to send to ``action.peer`` what it uses of a microbatch of ``shape``."""
        assert action.peer is not None
        key = (action.stage, action.peer, action.i)
        form = self._messenger.send(
            self._peer(action.peer, action),
            _kind(action.stage, action.peer, action.replica, shape),
            self._leaving.pop(key),
        )
        self._forms[key] = form.gradient()

    def post(self, action: Action, shape: tuple[int, ...]) -> None:
        """Begin to receive from ``action.peer``."""
        assert action.peer is not None
        self._arriving[action.peer, action.stage, action.i] = self._messenger.post(
            self._peer(action.peer, action), _kind(action.peer, action.stage, action.replica, shape)
        )

    def take(self, action: Action) -> dict[str, Any]:
        """The values that the forward pass ``action`` uses, waited for; their tensors are leaves."""
        i, target = action.i, action.stage
        values: dict[str, Any] = {}
        for source in self.sources[target]:
            key = (source, target, i)
            if self._peer(source, action) == self._rank:
                values |= self._leaving.pop(key)
            else:
                form, tensors = self._arriving.pop(key).wait()
                for tensor, told in zip(tensors, form.tensors, strict=True):
                    tensor.requires_grad_(told.needs_grad)
                self._forms[key] = form.gradient()
                values |= form.build(tensors)
        return values

    def give_back(self, action: Action, gradients: Gradients) -> None:
        """Take over the gradients that the backward pass ``action`` made of what came in."""
        for source in self.sources[action.stage]:
            if self._links[source, action.stage]:
                names = self._routes[source, action.stage]
                self._leaving_back[source, action.stage, action.i] = [
                    g for name in names for g in gradients.get(name, ())
                ]

    def send_back(self, action: Action) -> None:
        """Begin to send to ``action.peer`` the gradients of what it had sent."""
        assert action.peer is not None
        key = (action.peer, action.stage, action.i)
        self._messenger.send_tensors(
            self._peer(action.peer, action), self._leaving_back.pop(key), self._forms.pop(key).tensors
        )

    def post_back(self, action: Action) -> None:
        """Begin to receive, from ``action.peer``, the gradients of what was sent to it."""
        assert action.peer is not None
        key = (action.stage, action.peer, action.i)
        self._arriving_back[key] = self._messenger.post_tensors(self._peer(action.peer, action), self._forms.pop(key))

    def take_back(self, action: Action) -> Gradients:
        """Gradients of what stage ``action.stage`` gave, waited for and summed over the stages that used it."""
        i, source = action.i, action.stage
        sums: Gradients = {}
        for target in self.targets[source]:
            if not self._links[source, target]:
                continue
            key = (source, target, i)
            if self._peer(target, action) == self._rank:
                arrived = self._leaving_back.pop(key)
            else:
                _, arrived = self._arriving_back.pop(key).wait()
            for name, count in self._counts.pop(key).items():
                own, arrived = arrived[:count], arrived[count:]
                if name in sums:
                    for total, more in zip(sums[name], own, strict=True):
                        total += more
                else:
                    sums[name] = own
        return sums

    def _peer(self, stage: int, action: Action) -> int:
        return self._mesh.peer_team(self._rank, stage, action.replica)


def describe(values: Mapping[str, Any]) -> str:
    """Names and shapes, for messages."""
    return "; ".join(f"{name} {take_apart(value)[0]}" for name, value in values.items())


def _asking(value: Any) -> int:
    """Tensors of ``value`` that a gradient comes back for."""
    if isinstance(value, Tensor):
        return int(value.requires_grad)
    return sum(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in tree_leaves(value))


def _handed_over(leaf: Any) -> Any:
    """A tensor cut off from the graph that made it, asking for a gradient as it did."""
    return leaf.detach().requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf


def _kind(source: int, target: int, replica: int, shape: tuple[int, ...]) -> tuple[object, ...]:
    return ("training", source, target, replica, shape)
