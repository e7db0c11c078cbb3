"""Running average of a model's weights, kept in the state of the optimizer.

So the average lies on the rank that updates the parameter, and in the checkpoints of every strategy. It goes to the
host with the optimizer, and is rolled back with an update. After Polyak and Juditsky 1992; of exponential weights, as
Tarvainen and Valpola 2017.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

AVERAGE, UPDATES = "average", "averaged_updates"
"""Keys of a parameter's state: its average, and how many updates are in that."""


def keep_average(optimizer: Optimizer, decay: float) -> None:
    """Let ``optimizer`` average the parameters that it updates.

    The average is the first updated value, then decay x average + (1 - decay) x value. Decay rises with the number n of
    updates, as (1 + n) / (10 + n), up to ``decay``: the first values, which are far off, do not weigh for long.
    """

    def after_step(optimizer: Optimizer, *_: Any) -> None:
        _add(optimizer, decay)

    optimizer.register_step_post_hook(after_step)


@torch.no_grad()
def swap_average(optimizer: Optimizer) -> bool:
    """Exchange the parameters' values for their averages, and the averages for these values; twice is as before.

    Returns:
        whether there is any average.
    """
    pairs = [(p, state[AVERAGE]) for p, state in optimizer.state.items() if AVERAGE in state]
    for parameter, average in pairs:
        value = parameter.detach().clone()
        parameter.copy_(average)
        average.copy_(value)
    return bool(pairs)


def averages_of(checkpoint: dict[str, Any]) -> dict[str, Tensor]:
    """Return the averages in a state dict of an engine, by name of the parameter; empty where none are kept."""
    optimizer = checkpoint.get("optimizer", {"state": {}, "param_groups": []})
    states = optimizer["state"]
    return {
        name: states[number][AVERAGE]
        for group in optimizer["param_groups"]
        for number, name in zip(group["params"], group.get("param_names", ()), strict=False)
        if AVERAGE in states.get(number, {})
    }


@torch.no_grad()
def _add(optimizer: Optimizer, decay: float) -> None:
    """Add the values of the parameters that have just been updated to their averages."""
    by_decay: dict[float, tuple[list[Tensor], list[Tensor]]] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            state = optimizer.state[parameter]
            updates = state.get(UPDATES, 0)
            if not updates:
                state[AVERAGE] = parameter.detach().clone()
            else:
                averages, values = by_decay.setdefault(min(decay, (1 + updates) / (10 + updates)), ([], []))
                averages.append(state[AVERAGE])
                values.append(parameter.detach())
            state[UPDATES] = updates + 1
    for kept, (averages, values) in by_decay.items():
        torch._foreach_mul_(averages, kept)
        torch._foreach_add_(averages, values, alpha=1 - kept)
