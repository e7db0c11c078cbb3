"""One state dict for every strategy: what the plain module and a plain optimizer over its parameters would save.

Takes the parts that ranks hold; gives the whole, and takes it apart again. A checkpoint written under one strategy is
loaded under any other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from parallel.comm.communicator import Communicator
from parallel.comm.objects import gather_objects
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
        what it has. Buffers are those of replica 0, whatever a forward pass may do to them.
        """
        rank = self.communicator.rank
        givers = {number: self._giver(number) for number in self.stages}
        model = {
            key: value
            for number, stage in self.stages.items()
            for key, value in stage.module.state_dict().items()
            if rank == (givers[number] if key in stage.parameters else self.mesh.rank_at(number))
        }
        names = {name for number, stage in self.stages.items() if givers[number] == rank for name in stage.parameters}
        parts = gather_objects(self.communicator, {"model": model, "optimizer": self._optimizer_part(names)})
        if parts is None:
            return {}
        values: dict[str, Tensor] = {}
        states: dict[str, Any] = {}
        options: dict[str, Options] = {}
        for part in parts:
            values |= part["model"]
            states |= part["optimizer"]["state"]
            options |= part["optimizer"]["options"]
        numbers = range(len(self.parameters))
        return {
            "model": {key: values[key] for key in self.keys},
            "optimizer": {
                "state": {n: states[self.parameters[n]] for n in numbers if self.parameters[n] in states},
                "param_groups": grouped(self.parameters, [options[name] for name in self.parameters]),
            },
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
        optimizer.load_state_dict(own_state(optimizer, state["optimizer"], self.parameters))

    def _giver(self, number: int) -> int:
        """The rank whose copy of the parameters of stage ``number`` is taken: rank 0 if it has one that it updates
        itself. Where pairs of ranks share the optimizer's state, as both of a pair know, that is replica 0's."""
        updates_all = all(name in self.update.owned for stage in self.stages.values() for name in stage.parameters)
        return 0 if updates_all and 0 in self.mesh.ranks_with(number) else self.mesh.rank_at(number)

    def _optimizer_part(self, names: set[str]) -> dict[str, Any]:
        """State and options of the optimizer by name of parameter."""
        optimizer = self.update.optimizer
        if optimizer is None:
            return {"state": {}, "options": {}}
        return {
            "state": {
                name: optimizer.state[parameter]
                for name, parameter in self.update.owned.items()
                if name in names and parameter in optimizer.state
            },
            "options": options_by_name(optimizer),
        }


Options = dict[str, Any]
"""Of a group: learning rate, weight decay and the like."""

NOT_OPTIONS = ("params", "param_names")
DIVIDING = ("weight_decay", LR_SCALE)
"""Options by which parameters are grouped."""


def whole_state(optimizer: Optimizer, names: Sequence[str]) -> dict[str, Any]:
    """Return the state dict of ``optimizer``, which holds all parameters, numbered in the order of ``names``."""
    own, options = optimizer.state_dict(), options_by_name(optimizer)
    own_numbers = {
        name: number
        for group in own["param_groups"]
        for number, name in zip(group["params"], group["param_names"], strict=True)
    }
    states = {number: own["state"].get(own_numbers[name]) for number, name in enumerate(names)}
    return {
        "state": {number: state for number, state in states.items() if state is not None},
        "param_groups": grouped(names, [options[name] for name in names]),
    }


def own_state(optimizer: Optimizer, whole: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Return the part of ``whole`` that ``optimizer`` holds, as its ``load_state_dict`` takes it.

    Args:
        whole: as ``whole_state`` gave it.
        names: of the whole model's parameters, in order.

    Raises:
        ValueError: a parameter had another weight decay or learning rate than its group has.
    """
    numbers = {name: number for number, name in enumerate(names)}
    options = saved_options(whole["param_groups"])
    states, groups = {}, []
    for group in optimizer.state_dict()["param_groups"]:
        for own_number, name in zip(group["params"], group["param_names"], strict=True):
            number = numbers[name]
            for key in DIVIDING:
                if options[number].get(key) != group.get(key):
                    raise ValueError(
                        f"the checkpoint's optimizer has {key} {options[number].get(key)} for {name}, this one has "
                        f"{group.get(key)}: resume with the settings that the run was begun with"
                    )
            if number in whole["state"]:
                states[own_number] = whole["state"][number]
        own = {key: group[key] for key in NOT_OPTIONS}
        groups.append({**options[numbers[group["param_names"][0]]], **own})
    return {"state": states, "param_groups": groups}


def options_by_name(optimizer: Optimizer) -> dict[str, Options]:
    """Return the options of each parameter of ``optimizer``."""
    return {name: _options(group) for group in optimizer.param_groups for name in group["param_names"]}


def saved_options(groups: Sequence[Mapping[str, Any]]) -> dict[int, Options]:
    """Return the options of each parameter of saved groups, by its number."""
    return {number: _options(group) for group in groups for number in group["params"]}


def grouped(names: Sequence[str], options: Sequence[Options]) -> list[dict[str, Any]]:
    """Return groups as an optimizer's state dict has them.

    Args:
        names: of the parameters, in order.
        options: of each.
    """
    groups = []
    for _, run in groupby(range(len(names)), key=_run_of(options)):
        numbers = list(run)
        group_names = [names[number] for number in numbers]
        groups.append({**options[numbers[0]], "params": numbers, "param_names": group_names})
    return groups


def _run_of(options: Sequence[Options]) -> Callable[[int], int]:
    """Number of the run of equal options that each position is in."""
    runs = [0]
    for before, after in pairwise(options):
        runs.append(runs[-1] + (before != after))
    return runs.__getitem__


def _options(group: Mapping[str, Any]) -> Options:
    return {key: value for key, value in group.items() if key not in NOT_OPTIONS}
