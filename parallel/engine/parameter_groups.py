"""The groups of an optimizer, whoever holds which parameters: consecutive ones of the whole model with equal options.

Takes what optimizers over parts of a model have as groups; gives those of one optimizer over all of it, and back. As
groups are runs in the model's order, an optimizer numbers parameters in that order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby, pairwise
from typing import Any

from torch.optim import Optimizer

Options = dict[str, Any]
"""Of a group: learning rate, weight decay and the like."""

NOT_OPTIONS = ("params", "param_names")


def options_by_name(optimizer: Optimizer, names: Sequence[str]) -> dict[str, Options]:
    """Return the options of each parameter of ``optimizer``, called ``names`` in its order."""
    each = [options for group in optimizer.param_groups for options in [_options(group)] * len(group["params"])]
    return dict(zip(names, each, strict=True))


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
