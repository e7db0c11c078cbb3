"""The state dict of an optimizer over a whole model, whatever its groups are and whoever holds which parameters.

In a checkpoint parameters are numbered in the model's order, and groups are consecutive parameters with equal options.
An optimizer may group them otherwise and hold a part of them: its parameters are found by their names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby, pairwise
from typing import Any

from torch.optim import Optimizer

from parallel.offload.host_optimizer import LR_SCALE

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
