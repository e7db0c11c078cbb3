"""The optimizer on the host: its state never takes the device's memory, and its step overlaps the backward pass.

A gradient that is final goes to the host while the backward pass continues, and a thread there updates the host's copy
of the parameter; the device takes the new values when the step is applied. After Ren et al. 2021, ZeRO-Offload,
sections 4 and 5.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from parallel.comm.device_thread import on_current_device
from parallel.comm.grad_reducer import added_twice, on_gradient
from parallel.offload.copies import Copies, Mark

Before = tuple[Tensor, dict[str, Any] | None]
"""A parameter and its state in the optimizer before an update; None: it had none."""


class HostOptimizer:
    """Updates parameters as the optimizer would that is over them.

    What is updated before ``apply`` can be taken back until then, so that a step is still refused as a whole. Such an
    update reads no other parameter's gradient: it is for optimizers that update elementwise, as SGD and Adam do.

    Args:
        make_optimizer: over the named parameters it is given.
        parameters: by name, at least one.
        copies: of the device they are on.
        resident: the parameters themselves are on the host, and so are their gradients; nothing is copied.

    Attributes:
        owned: what the optimizer is over, by the names of ``parameters``.
        before_update: is called on the thread that updates, each time before it does.
    """

    def __init__(
        self,
        make_optimizer: Callable[[Iterable[tuple[str, nn.Parameter]]], Optimizer],
        parameters: Mapping[str, nn.Parameter],
        copies: Copies,
        *,
        resident: bool = False,
    ) -> None:
        self._parameters = dict(parameters)
        self._copies = copies
        self.resident = resident
        self.before_update: Callable[[], None] = nothing
        self.owned = {name: self._on_host(parameter) for name, parameter in parameters.items()}
        self.optimizer = make_optimizer(list(self.owned.items()))
        self._versions: dict[str, int] = {}
        """Of the parameters, when they last were the same as those on the host."""
        self._gradients: dict[str, Tensor] = {}
        self._final: set[str] = set()
        self._begun: set[str] = set()
        """Whose update is asked for in this step."""
        self._ready: collections.deque[tuple[str, Mark]] = collections.deque()
        self._replaced: dict[str, Before] | None = {}
        """What has been updated; None: it will not be taken back."""
        self._spare: dict[str, Before] = {}
        """Memory of what earlier steps have replaced, to be used again: to take new memory costs more than the copy."""
        self._jobs: list[Future[None]] = []
        self._worker = ThreadPoolExecutor(1, "host-optimizer", on_current_device(nothing))
        for name, parameter in self._parameters.items():
            if parameter.requires_grad:
                on_gradient(parameter, self._added, name)

    def begin_step(self) -> None:
        """Forget the step before, if it was not applied."""
        self.rollback()
        self._copy_changed()

    def expect_final_grads(self, learning_rate: float, names: Iterable[str] | None = None) -> None:
        """Update parameters while the backward pass continues: gradients that are added next are final.

        Args:
            names: of the parameters this is so for; None: all.
        """
        set_learning_rate(self.optimizer, learning_rate)
        self._final = set(self._parameters if names is None else names)

    def gradient_ready(self, name: str) -> None:
        """Update ``name``: its gradient is final. Takes place on another thread."""
        gradient = self._parameters[name].grad
        assert gradient is not None, name
        assert name not in self._begun, name
        self._begun.add(name)
        mark = None
        if self.resident:
            self._gradients[name] = gradient
        else:
            if name not in self._gradients:
                self._gradients[name] = self._copies.empty_like_on_host(gradient)
            mark = self._copies.to_host(gradient, self._gradients[name])
        self._ready.append((name, mark))
        self._jobs.append(self._worker.submit(self._update))

    @torch.no_grad()
    def apply(self, learning_rate: float) -> None:
        """Update what has not been updated and has a gradient, and let the parameters have their new values."""
        if not self._begun:
            self._copy_changed()
            set_learning_rate(self.optimizer, learning_rate)
        assert all(g["lr"] == scaled(g, learning_rate) for g in self.optimizer.param_groups), (
            "expected with another rate"
        )
        self._final.clear()
        self._finish()
        self._replaced = None
        for name, parameter in self._parameters.items():
            if parameter.grad is not None and name not in self._begun:
                self.gradient_ready(name)
        self._finish()
        if not self.resident:
            self._copy_back(self._begun)
        self._reset()

    @torch.no_grad()
    def exchange(self, swap: Callable[[Optimizer], bool]) -> None:
        """Let ``swap`` change the values of all parameters between two steps; it says whether it did."""
        self._copy_changed()
        if swap(self.optimizer) and not self.resident:
            self._copy_back(self._parameters)

    def _copy_back(self, names: Iterable[str]) -> None:
        for name in names:
            self._parameters[name].copy_(self.owned[name], non_blocking=True)
        self.mark_copied(names)

    def mark_copied(self, names: Iterable[str]) -> None:
        """Take these parameters to be the same on the host, whatever has been written to the memory around them."""
        for name in names:
            self._versions[name] = self._parameters[name]._version

    @torch.no_grad()
    def rollback(self) -> None:
        """Undo what has been updated since the last ``apply``: parameters and state are as they were."""
        self._final.clear()
        try:
            self._finish()
        finally:
            for name, (value, state) in (self._replaced or {}).items():
                del self._spare[name]
                own = self.owned[name]
                own.copy_(value)
                self.optimizer.state.pop(own, None)
                if state is not None:
                    self.optimizer.state[own] = state
            self._reset()

    def _reset(self) -> None:
        self._ready.clear()
        self._begun.clear()
        self._replaced = {}
        if self.resident:
            self._gradients.clear()

    def _on_host(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return the parameter that the optimizer is over, with a ``grad`` of its own."""
        values = parameter.detach() if self.resident else self._copies.empty_like_on_host(parameter.detach())
        return nn.Parameter(values, requires_grad=parameter.requires_grad)

    @torch.no_grad()
    def _copy_changed(self) -> None:
        """Copy the values of parameters that were changed by others: loaded, or received from another rank."""
        if self.resident:
            return
        marks = []
        for name, parameter in self._parameters.items():
            if self._versions.get(name) != parameter._version:
                marks.append(self._copies.to_host(parameter.detach(), self.owned[name].detach()))
                self._versions[name] = parameter._version
        for mark in marks:
            self._copies.synchronize(mark)

    def _added(self, name: str) -> None:
        if name in self._begun:
            raise added_twice(self._parameters[name], "leave --offload-state out")
        if name in self._final:
            self._final.remove(name)
            self.gradient_ready(name)

    def _finish(self) -> None:
        jobs, self._jobs = self._jobs, []
        wait(jobs)
        for job in jobs:
            job.result()

    @torch.no_grad()
    def _update(self) -> None:
        """Update, on the thread, the parameters whose gradients have come."""
        names = []
        while self._ready:
            name, mark = self._ready.popleft()
            self._copies.synchronize(mark)
            own = self.owned[name]
            if self._replaced is not None:
                value, state = self._spare.get(name, (None, None))
                before = _copied(own.detach(), value), _copied_state(self.optimizer.state.get(own), state or {})
                self._replaced[name] = self._spare[name] = before
            own.grad = self._gradients[name]
            names.append(name)
        if names:
            self.before_update()
            self.optimizer.step()
        for name in names:
            self.owned[name].grad = None


def _copied(value: Any, into: Tensor | None) -> Any:
    """Return ``value``, or a copy of a tensor; ``into``: memory of a tensor of its size, if there is any."""
    if not isinstance(value, Tensor):
        return value
    return value.clone() if into is None else into.copy_(value)


def _copied_state(state: Mapping[str, Any] | None, into: Mapping[str, Any]) -> dict[str, Any] | None:
    return None if state is None else {key: _copied(value, into.get(key)) for key, value in state.items()}


def nothing() -> None:
    """Do nothing: the default of ``before_update``."""


LR_SCALE = "lr_scale"
"""Option of a group: what the learning rate of a step is multiplied with for its parameters; where it is missing, 1."""


def set_learning_rate(optimizer: Optimizer, learning_rate: float) -> None:
    """Set the rate of the next update."""
    for group in optimizer.param_groups:
        group["lr"] = scaled(group, learning_rate)


def scaled(group: Mapping[str, Any], learning_rate: float) -> float:
    """Return the learning rate of ``group`` in a step of rate ``learning_rate``."""
    return learning_rate * float(group.get(LR_SCALE, 1.0))
