"""Training with delayed gradients in one process: what ``--parallel pipedream`` and ``async`` are held against.

A step is a window of minibatches, the microbatches of ``ExactnessTrial``. Under pipedream each updates every stage,
with gradients of the weights that it went forward with (Harlap et al., 2018, section 3.3: weight stashing). Under async
the log of pushes says which minibatch updates which version, with gradients of which.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from app.training.exactness import ExactnessTrial, MeasuredEngine, PlainTraining, StepOutcome
from parallel.engine.async_engine import AsyncEngine
from parallel.engine.engine import Engine
from parallel.schedule.action import versions


def reference(trial: ExactnessTrial, engine: MeasuredEngine) -> DelayedTraining:
    """Return what ``engine``, each rank of which has one stage, is held against."""
    assert isinstance(engine, Engine)
    used = [versions(actions)[0] for actions in engine.schedule.values()]
    return DelayedTraining(trial, dict(ChainMap(*used)))


class DelayedTraining(PlainTraining):
    """The loop of one process, with the weights of ``versions``.

    Args:
        versions: (stage, microbatch) -> updates of the stage in this step before the forward pass of the microbatch.
    """

    def __init__(self, trial: ExactnessTrial, versions: Mapping[tuple[int, int], int]) -> None:
        super().__init__(trial)
        self._versions = versions

    def step(self, step: int) -> StepOutcome:
        """Compute the window ``step`` from the present state."""
        sizes = self._trial.sizes
        stage_of = {name: k for k, names in enumerate(self.held_by_ranks) for name in names}
        parameters = {name: p for name, p in self.module.named_parameters() if name in stage_of}
        history = [{name: p.detach().clone() for name, p in parameters.items()}]
        total = 0.0
        for t, size in enumerate(sizes):
            for name, parameter in parameters.items():
                parameter.data.copy_(history[self._versions[stage_of[name], t]][name])
            self.optimizer.zero_grad()
            loss = self.loss_of(step, t)
            loss.backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach()) * (size / sum(sizes))
            for name, parameter in parameters.items():
                parameter.data.copy_(history[-1][name])
            self.optimizer.step()
            history.append({name: p.detach().clone() for name, p in parameters.items()})
        return self.outcome(total)


class LoggedPushes(PlainTraining):
    """The loop of one process, with the updates that the parameter server of ``engine`` has made in the same step."""

    def __init__(self, trial: ExactnessTrial, engine: MeasuredEngine) -> None:
        super().__init__(trial)
        assert isinstance(engine, AsyncEngine)
        self._engine = engine

    def step(self, step: int) -> StepOutcome:
        """Apply the pushes to the present state."""
        sizes, total = self._trial.sizes, 0.0
        versions = [self._copy()]
        for push in self._engine.pushes:
            self._load(versions[push.pulled])
            self.optimizer.zero_grad()
            loss = self.loss_of(step, push.minibatch)
            loss.backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach()) * (sizes[push.minibatch] / sum(sizes))
            self._load(versions[-1])
            for group in self.optimizer.param_groups:
                group["lr"] = push.learning_rate
            self.optimizer.step()
            versions.append(self._copy())
        return self.outcome(total)

    def _copy(self) -> list[Tensor]:
        return [parameter.detach().clone() for parameter in self.module.parameters()]

    @torch.no_grad()
    def _load(self, version: Sequence[Tensor]) -> None:
        for parameter, value in zip(self.module.parameters(), version, strict=True):
            parameter.copy_(value)
