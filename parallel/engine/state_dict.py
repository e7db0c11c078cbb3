"""One state dict for every strategy: what the plain module and a plain optimizer over its parameters would save.

A checkpoint written under one strategy is loaded under any other.
"""

from __future__ import annotations

import itertools
from collections import ChainMap, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from parallel.comm.communicator import Communicator
from parallel.comm.objects import gather_objects
from parallel.comm.sharded_reducer import joined
from parallel.engine.optimizer_step import OptimizerStep
from parallel.offload.host_optimizer import LR_SCALE
from parallel.schedule.mesh import Mesh
from parallel.stage.stage import Stage


@dataclass(frozen=True)
class FullStateDict:
    """The state of a model whose stages are spread over ranks.

    Attributes:
        keys: of the whole model's state dict, in order.
        parameters: names of the whole model's parameters, in order; an optimizer numbers them so.
    """

    keys: Sequence[str]
    parameters: Sequence[str]
    stages: Mapping[int, Stage]
    update: OptimizerStep
    mesh: Mesh
    communicator: Communicator

    def gather(self) -> dict[str, Any]:
        """``model`` and ``optimizer`` on rank 0, {} on the others; every rank takes part.

        Copies of a stage have the same parameters and optimizer state to the last bit: rank 0 is sent no other copy of
        what it has. Of a stage that is divided every rank gives the state of its pieces. Buffers are those of replica
        0, whatever a forward pass may do to them.
        """
        # The rank whose copy of the parameters of each stage is taken: rank 0 if it has one.
        givers = {n: 0 if 0 in self.mesh.ranks_with(n) else self.mesh.rank_at(n) for n in self.stages}
        model = {
            key: value
            for number, stage in self.stages.items()
            for key, value in stage.module.state_dict().items()
            if self._gives(key, stage, givers[number] if key in stage.parameters else self.mesh.rank_at(number))
        }
        optimizer, pieces = self.update.optimizer, self.update.pieces
        states, options = (states_by_name(optimizer), options_by_name(optimizer)) if optimizer else ({}, {})
        own = [
            (name, pieces[name].begin if name in pieces else 0, state)
            for name, state in states.items()
            if name in pieces or name in model
        ]
        parts = gather_objects(self.communicator, (model, own, options))
        if parts is None:
            return {}
        models, owned, options_of = zip(*parts, strict=True)
        model, options = dict(ChainMap(*models)), dict(ChainMap(*options_of))
        by_begin: dict[str, dict[int, Any]] = defaultdict(dict)
        for name, begin, state in itertools.chain(*owned):
            by_begin[name][begin] = state
        return {
            "model": {key: model[key] for key in self.keys},
            "optimizer": whole_state(
                self.parameters, {name: joined(model[name], states) for name, states in by_begin.items()}, options
            ),
        }

    def scatter(self, state: dict[str, Any]) -> None:
        """Take this rank's part of what ``gather`` gave.

        Raises:
            ValueError: it is of another model.
        """
        model: dict[str, Tensor] = state["model"]
        strange = sorted(set(model) ^ set(self.keys))
        if strange:
            raise ValueError(
                f"the checkpoint is of another model: {len(strange)} names are in one of the two only, such as "
                f"{', '.join(strange[:3])}; use the --model it was made with"
            )
        for stage in self.stages.values():
            stage.module.load_state_dict({key: model[key] for key in stage.module.state_dict()})
        optimizer = self.update.optimizer
        if optimizer is None:
            return
        own = own_state(optimizer, state["optimizer"], self.parameters)
        for group in own["param_groups"]:
            for number, name in zip(group["params"], group["param_names"], strict=True):
                if name in self.update.pieces and number in own["state"]:
                    own["state"][number] = self.update.pieces[name].of_state(own["state"][number])
        optimizer.load_state_dict(own)

    def _gives(self, key: str, stage: Stage, giver: int) -> bool:
        """Return whether this rank gives ``key``: ``giver`` does, or who alone in the first team holds it."""
        rank = self.communicator.rank
        return self.mesh.team_of(rank) == 0 if key in stage.module.of_one_member else rank == giver


Options = dict[str, Any]
"""Of a group: learning rate, weight decay and the like."""

NOT_OPTIONS = ("params", "param_names")
DIVIDING = ("weight_decay", LR_SCALE)
"""Options by which parameters are grouped."""


def whole_state(names: Sequence[str], states: Mapping[str, Any], options: Mapping[str, Options]) -> dict[str, Any]:
    """Return the state dict of a plain optimizer over the parameters ``names``, of state and options by name."""
    groups = []
    for own, run in groupby(range(len(names)), key=lambda number: options[names[number]]):
        numbers = list(run)
        groups.append({**own, "params": numbers, "param_names": [names[number] for number in numbers]})
    state = {number: states[name] for number, name in enumerate(names) if name in states}
    return {"state": state, "param_groups": groups}


def own_state(optimizer: Optimizer, whole: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Return the part of ``whole`` that ``optimizer`` holds, as its ``load_state_dict`` takes it.

    Args:
        whole: as ``whole_state`` gave it, or a plain optimizer over named parameters.
        names: of the whole model's parameters, in order.

    Raises:
        ValueError: a parameter had another weight decay or learning rate than its group has, or is not there, or
            parameters of several groups have no names.
    """
    held = whole["param_groups"]
    pairs = (zip(group.get("param_names", ()), group["params"], strict=False) for group in held)
    named = {name: number for group in pairs for name, number in group}
    if not named and len(held) > 1:  # a plain optimizer numbers its parameters group by group
        raise ValueError(
            f"the checkpoint's optimizer has {len(held)} groups without param_names: save it from an optimizer over "
            "named parameters"
        )
    numbers = named or {name: number for number, name in enumerate(names)}
    options = {number: _options(group) for group in whole["param_groups"] for number in group["params"]}
    states: dict[int, Any] = {}
    groups = []
    for group in optimizer.state_dict()["param_groups"]:
        for own_number, name in zip(group["params"], group["param_names"], strict=True):
            number = numbers.get(name)
            if number not in options:
                raise ValueError(
                    f"the checkpoint's optimizer lacks {name}: save it from an optimizer over all named parameters"
                )
            for key in DIVIDING:
                if options[number].get(key) != group.get(key):
                    raise ValueError(
                        f"the checkpoint's optimizer has {key} {options[number].get(key)} for {name}, this one has "
                        f"{group.get(key)}: resume with the settings that the run was begun with"
                    )
            if number in whole["state"]:
                states[own_number] = whole["state"][number]
        groups.append({**options[numbers[group["param_names"][0]]], **{key: group[key] for key in NOT_OPTIONS}})
    return {"state": states, "param_groups": groups}


def states_by_name(optimizer: Optimizer) -> dict[str, Any]:
    """Return the state of each parameter of ``optimizer`` that has one."""
    groups = optimizer.param_groups
    parameters = (pair for group in groups for pair in zip(group["param_names"], group["params"], strict=True))
    return {name: optimizer.state[parameter] for name, parameter in parameters if parameter in optimizer.state}


def options_by_name(optimizer: Optimizer) -> dict[str, Options]:
    """Return the options of each parameter of ``optimizer``."""
    return {name: _options(group) for group in optimizer.param_groups for name in group["param_names"]}


def _options(group: Mapping[str, Any]) -> Options:
    return {key: value for key, value in group.items() if key not in NOT_OPTIONS}
