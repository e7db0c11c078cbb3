"""What torch's own pipelines (--parallel torch-gpipe, torch-1f1b) cannot do, of what a user asks for.

The rest is found when the model is split (``parallel.engine.torch_crossings``): values that pass over stages, or are
not tensors.
"""

from __future__ import annotations

from app.settings.strategy import StrategySettings


def torch_division_faults(asked: StrategySettings) -> list[str]:
    """Of ranks, stages, batch and microbatches that would fit our own schedule."""
    found = []
    instead = f"or use --parallel {asked.schedule_name}"
    if asked.groups > 1:
        found.append(
            f"--parallel {asked.name} is one pipeline over all ranks; got --stages {asked.depth} for {asked.world} "
            f"ranks: leave --stages out, {instead}, which makes groups of ranks"
        )
    if asked.schedule_name == "1f1b" and asked.m < asked.depth:
        found.append(
            f"--parallel {asked.name} needs as many microbatches as stages; got --microbatches {asked.m} for "
            f"{asked.depth} stages: raise --microbatches, {instead}"
        )
    if asked.batch % asked.m:
        fitting = [m for m in range(1, asked.batch + 1) if not asked.batch % m]
        found.append(
            f"--parallel {asked.name} takes microbatches of one size, as torch's pipelines fix the shapes of what they "
            f"send; got --batch {asked.batch} in --microbatches {asked.m}: use one of {', '.join(map(str, fitting))}, "
            f"another --batch, {instead}"
        )
    return found


def torch_option_faults(asked: StrategySettings) -> list[str]:
    """Of options that belong to our own schedules."""
    return [
        f"{flag} is not for --parallel {asked.name}, which is torch's pipeline as it is: leave it out, or use "
        f"--parallel {asked.schedule_name}"
        for flag, given in (
            (f"--schedule {asked.schedule}", asked.schedule is not None),
            (f"--recompute {asked.recompute}", asked.recompute != "none"),
            (f"--offload {asked.offload}", asked.offload != "none"),
            (f"--offload-state {asked.offload_state}", asked.offload_state != "none"),
            ("--compile", asked.compile),
        )
        if given
    ]
