"""Training with delayed gradients in one process: what ``--parallel pipedream`` is held against.

A step is a window of minibatches, the microbatches of ``ExactnessTrial``. Each updates every stage, with gradients of
the weights that it went forward with (PipeDream, Harlap et al., 2018, section 3.3: weight stashing).
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping

from app.training.exactness import ExactnessTrial, MeasuredEngine, PlainTraining, StepOutcome
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
