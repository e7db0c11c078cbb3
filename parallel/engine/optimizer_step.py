"""The optimiser step of one rank: over the stages it holds, or over its slices of those that several ranks hold.

With ``--zero 1`` or ``2`` each of the ranks that hold a stage keeps the optimizer state of its slice, updates that, and
gathers the rest (``comm.sharded_reducer``; Rajbhandari et al. 2020, ZeRO). A running average of the weights is part of
the optimizer's state, so it lies on the rank that updates the parameter, and in the checkpoints of every strategy
(Polyak and Juditsky 1992; of exponential weights, Tarvainen and Valpola 2017).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from parallel.comm.sharded_reducer import ParameterPiece, ShardedReducer
from parallel.offload.copies import Copies
from parallel.offload.host_optimizer import LR_SCALE, HostOptimizer, nothing, set_learning_rate

AVERAGE, UPDATES = "average", "averaged_updates"
"""Keys of a parameter's state: its average, and how many updates are in that."""


def keep_average(optimizer: Optimizer, decay: float) -> None:
    """Let ``optimizer`` average the parameters that it updates.

    The average is the first updated value, then decay x average + (1 - decay) x value. Decay rises with the number n of
    updates, as (1 + n) / (10 + n), up to ``decay``: the first values, which are far off, do not weigh for long.
    """
    optimizer.register_step_post_hook(lambda optimizer, *_: _add(optimizer, decay))


@torch.no_grad()
def swap_average(optimizer: Optimizer) -> bool:
    """Exchange the parameters' values for their averages, and the averages for these values; twice is as before. Return
    whether there is any average."""
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


MakeOptimizer = Callable[[Iterable[tuple[str, nn.Parameter]]], Optimizer]
"""(name in the whole model, parameter), in the model's order -> an optimizer over them in that order."""


ELEMENTWISE = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop)
"""Optimizers whose update of a number depends on that number alone, and so may have pieces of parameters."""


class OptimizerStep:
    """Zeroes gradients before a step and updates parameters after it.

    Args:
        owned: parameters that this rank updates, by name; pieces of those that are divided among ranks.
        unshared: parameters whose gradients stay on this rank; those of shared ones are zeroed by their reducer.
        held: all parameters this rank holds, by name.
        pieces: of ``owned``, those that are pieces, by name.
        shards: gather the parameters that are divided, in the same order on all ranks.
        offload: copies to and from the host, where the optimizer then is; None: it is where the parameters are.
        resident: with ``offload``, the parameters are on the host themselves.

    Raises:
        ValueError: the optimizer cannot update pieces of parameters, or as ``validate_groups``.
    """

    def __init__(
        self,
        make_optimizer: MakeOptimizer,
        *,
        owned: Mapping[str, nn.Parameter],
        unshared: Iterable[nn.Parameter],
        held: Mapping[str, nn.Parameter],
        pieces: Mapping[str, ParameterPiece] = MappingProxyType({}),
        shards: Sequence[ShardedReducer] = (),
        offload: Copies | None = None,
        resident: bool = False,
    ) -> None:
        self.owned = dict(owned)
        self.optimizer: Optimizer | None = None
        self._host: HostOptimizer | None = None
        if owned and offload is not None:
            self._host = HostOptimizer(make_optimizer, owned, offload, resident=resident)
            self.owned, self.optimizer = self._host.owned, self._host.optimizer
        elif owned:
            self.optimizer = make_optimizer(list(owned.items()))
        if self.optimizer is not None:
            validate_groups(self.optimizer, self.owned)
        if pieces and type(self.optimizer) not in ELEMENTWISE:
            able = ", ".join(each.__name__ for each in ELEMENTWISE)
            raise ValueError(
                f"--zero 1 and 2 divide parameters at any element, and {type(self.optimizer).__name__} may need whole "
                f"ones: use one of {able}, or --zero 0"
            )
        self._unshared = tuple(unshared)
        self._held = dict(held)
        self._trained = [parameter.requires_grad for parameter in held.values()]
        self.pieces, self._shards = pieces, tuple(shards)
        self._before_update = nothing

    def before_update(self, call: Callable[[], None]) -> None:
        """Call ``call`` right before the next update, as ``step.TrainingEngine`` says."""
        if self._host is not None:
            self._host.before_update = call
        self._before_update = call

    def on_device(self) -> Iterator[Tensor]:
        """Parameters, gradients and optimizer state that are on the device between two steps."""
        if self._host is None or not self._host.resident:
            for parameter in self._held.values():
                yield from (parameter,) if parameter.grad is None else (parameter, parameter.grad)
            yield from self._piece_grads()
        for state in self.optimizer.state.values() if self.optimizer and self._host is None else ():
            yield from (value for value in state.values() if isinstance(value, Tensor))

    def begin_step(self) -> None:
        if [parameter.requires_grad for parameter in self._held.values()] != self._trained:
            raise requires_grad_changed(self._held, self._trained)
        if self._host is not None:
            self._host.begin_step()
        for parameter in self._unshared:
            parameter.grad = None

    def expect_final_grads(self, parameters: Mapping[str, nn.Parameter], learning_rate: float) -> None:
        """The next backward pass is the last of this step for ``parameters``, by name. With the optimizer on the host,
        those of them whose gradients stay on this rank are updated there while it still runs."""
        if self._host is not None:
            mine = {id(parameter) for parameter in self._unshared}
            names = [name for name, p in parameters.items() if id(p) in mine and name in self.owned]
            self._host.expect_final_grads(learning_rate, names)

    def rollback(self) -> None:
        """Restore parameters and optimizer as they were before the step."""
        if self._host is not None:
            self._host.rollback()

    def apply_to(self, new: Mapping[nn.Parameter, nn.Parameter], learning_rate: float) -> None:
        """Update after a microbatch.

        Args:
            new: parameter -> the one that takes its place in the optimizer from now on, with its state.
        """
        if new and self.optimizer is not None:
            for group in self.optimizer.param_groups:
                group["params"] = [new.get(parameter, parameter) for parameter in group["params"]]
            for old, parameter in new.items():
                if old in self.optimizer.state:
                    self.optimizer.state[parameter] = self.optimizer.state.pop(old)
            self.owned = {name: new.get(parameter, parameter) for name, parameter in self.owned.items()}
            self._unshared = tuple(new.get(parameter, parameter) for parameter in self._unshared)
            self._held = {name: new.get(parameter, parameter) for name, parameter in self._held.items()}
        self.apply(learning_rate, scale=1.0)

    @torch.no_grad()
    def apply(self, learning_rate: float, scale: float) -> None:
        """Update, after the gradients have been summed.

        Args:
            scale: what the gradients are multiplied with; 1 in the usual step.
        """
        gradients = [p.grad for p in self._held.values() if p.grad is not None] + self._piece_grads()
        if scale != 1 and gradients:
            self.rollback()
            torch._foreach_mul_(gradients, scale)
        self._before_update()
        if self._host is not None:
            self._host.apply(learning_rate)
        elif self.optimizer is not None:
            set_learning_rate(self.optimizer, learning_rate)
            self.optimizer.step()
        self._gather_updated()

    def swap_average(self) -> None:
        """Exchange the parameters' values for their averages where the optimizer keeps any, on all ranks alike."""
        self._before_update()
        if self._host is not None:
            self._host.exchange(swap_average)
        elif self.optimizer is not None:
            swap_average(self.optimizer)
        self._gather_updated()

    def _gather_updated(self) -> None:
        """Take what other ranks have updated of the parameters that are divided among them."""
        for shard in self._shards:
            shard.gather_parameters()
        if self._shards and self._host is not None:
            self._host.mark_copied(self.pieces)

    def _piece_grads(self) -> list[Tensor]:
        return [piece.value.grad for piece in self.pieces.values() if piece.value.grad is not None]


def validate_groups(optimizer: Optimizer, parameters: Mapping[str, nn.Parameter]) -> None:
    """Refuse an optimizer whose state cannot be saved by name, or whose learning rates a step would replace.

    Raises:
        ValueError: it is not over the named ``parameters``, or a group without ``LR_SCALE`` has a learning rate of
            its own.
    """
    groups = optimizer.param_groups
    pairs = (zip(group.get("param_names", ()), group["params"], strict=False) for group in groups)
    named = {name: parameter for group in pairs for name, parameter in group}
    if strange := [name for name in {**parameters, **named} if named.get(name) is not parameters.get(name)]:
        raise ValueError(
            f"the optimizer lacks or renames {len(strange)} of the {len(parameters)} parameters that make_optimizer is "
            f"given, such as {strange[0]}: pass it all pairs of name and parameter, also those of frozen parameters"
        )
    usual = optimizer.defaults.get("lr")  # a rank of a pipeline may hold one of the groups alone
    if rates := [group.get("lr") for group in groups if LR_SCALE not in group and group.get("lr") != usual]:
        raise ValueError(
            f"a group of the optimizer has the learning rate {rates[0]}, others {usual}, and engine.step would replace "
            f"both by one: give the group a factor in place of it, such as {LR_SCALE!r}: 0.01"
        )


def requires_grad_changed(parameters: Mapping[str, nn.Parameter], trained: Sequence[bool]) -> ValueError:
    """Return the error for ``parameters`` of which others require a gradient than when the engine was built."""
    pairs = zip(parameters.items(), trained, strict=True)
    name, before = next((name, was) for (name, parameter), was in pairs if parameter.requires_grad != was)
    return ValueError(
        f"requires_grad of {name} is {not before}, and was {before} when the engine was built: assemble the engine "
        "again and load its state"
    )
