"""``python -m app.verify``: does a strategy compute for your model what one process would? Exactly, tensor by tensor.

Takes a model and a strategy, as ``app.train`` does; gives a table of the largest relative errors, ``verify.json``, and
exit code 0 when losses, gradients, running statistics and updated parameters are those of the plain step.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from app.settings.cli import FAILED, OK, run_command
from app.settings.launcher import find_launch
from app.settings.strategy import StrategySettings
from app.settings.strategy_faults import strategy_faults

if TYPE_CHECKING:
    import torch

    from app.training.exactness import ExactnessTrial, MakeEngine


@dataclass(frozen=True)
class VerifyCommand:
    """Hold a strategy against the plain single-process step, on random tiles: losses, every gradient, running
    statistics, and parameters after a few steps. Passed means an error of at most 1e-10 in float64, 1e-5 in float32,
    relative to the largest value of the tensor it is in, or what rounding alone does to it."""

    strategy: StrategySettings = field(default_factory=StrategySettings)
    model: str = "resnet18"
    """As for app.train: a name of ours, smp:NAME(ENCODER), torchvision:NAME, timm:NAME or package.module:factory."""
    norm: Literal["batch", "group", "instance", "frozen", "layer"] = "batch"
    """Normalisation."""
    head: Literal["average", "gem", "attention"] = "average"
    """What pools the last map of a classifier."""
    classes: int = 3
    """Classes that the model tells apart."""
    tile: int = 64
    """Side of the tiles in px."""
    dtype: Literal["float64", "float32"] = "float64"
    """Type of parameters and tiles; float64 leaves errors no rounding to hide in."""
    steps: int | None = None
    """Optimiser steps; the gradients of the first are compared, all else after the last. Default: 3 in float64, 1 in
    float32, where the rounding of one step may decide the next one's maxima."""
    communicator: Literal["auto", "threads", "gloo", "mpi"] = "auto"
    """How ranks talk. threads: in this process; gloo: processes, started here or by torchrun; mpi: started by mpirun;
    auto: as they were started, else threads, or gloo where threads cannot, as with fsdp."""
    seed: int = 0
    """Of weights, tiles and dropout."""
    out: Path | None = None
    """Folder for verify.json."""

    @property
    def talks_over(self) -> Literal["threads", "gloo", "mpi"]:
        """How ranks talk, ``auto`` decided."""
        if self.communicator != "auto":
            return self.communicator
        launch = find_launch()
        if launch is None:
            return "gloo" if self.strategy.over_torch or self.strategy.is_mixed else "threads"
        return "mpi" if launch.mpi else "gloo"

    def validate(self) -> list[str]:
        faults = strategy_faults(self.strategy)
        for name, value in (("classes", self.classes), ("tile", self.tile), ("steps", self.steps)):
            if value is not None and value < 1:
                faults.append(f"--{name} must be at least 1; got {value}")
        if self.strategy.undecided and self.strategy.world > 1:
            faults.append("--parallel auto is for training, where it is planned: name the strategy to verify")
        if self.strategy.runs_undecided:
            faults.append(
                "--recompute optimal is planned for a memory, by app.train or by app.plan --out; got no "
                "--developer recompute-runs: name the layers that are computed again, as a plan wrote them"
            )
        if self.strategy.box_undecided:
            faults.append("--stream auto is planned for a memory, by app.train: give the side of the boxes in px")
        if self.strategy.precision == "bf16":
            faults.append("--precision bf16 rounds far more than strategies differ: leave it out")
        if self.strategy.norm_statistics == "deferred" and self.norm != "batch":
            faults.append(f"--developer norm-statistics deferred is about --norm batch; got --norm {self.norm}")
        if self.strategy.over_torch and self.communicator == "threads":
            faults.append(
                f"--parallel {self.strategy.name} talks over torch.distributed: leave --communicator threads out, or "
                "use gloo"
            )
        if self.strategy.is_mixed and self.communicator == "threads":
            faults.append("--device mixed is of processes: leave --communicator threads out, or use gloo")
        launch = find_launch()
        started = "nothing" if launch is None else "mpirun" if launch.mpi else "torchrun"
        if self.communicator != "auto" and (
            (self.communicator == "mpi" and started != "mpirun")
            or (self.communicator == "gloo" and started == "mpirun")
            or (self.communicator == "threads" and launch is not None)
        ):
            faults.append(
                f"--communicator {self.communicator} does not fit ranks started by {started}: start mpi under mpirun, "
                "gloo alone or under torchrun, threads alone"
            )
        return faults


@dataclass(frozen=True)
class VerifyResult:
    """One line of a table of strategies.

    Attributes:
        loss_error: largest relative error of a step's loss.
        errors: top-level module -> gradients, parameters, statistics -> largest relative error.
        tolerance: allowed of every tensor; more where ``noise`` says so.
        steps: that were compared; 1 where the rounding of more would hide a fault.
        noise: largest relative difference that tiles one rounding off make to a tensor in the plain step.
        exceeded: tensors whose error is more than allowed, the worst first.
    """

    model: str
    strategy: str
    ranks: int
    stages: int
    microbatches: int
    batch: int
    tile_px: int
    dtype: str
    communicator: str
    tolerance: float
    loss_error: float
    errors: dict[str, dict[str, float]]
    max_relative_error: float
    passed: bool
    steps: int = 1
    noise: float = 0.0
    exceeded: list[str] = field(default_factory=list)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0: exact; 1: not exact, or failed; 2: wrong usage."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    return run_command(VerifyCommand, lambda command: _run(command, arguments), arguments, "python -m app.verify")


def _run(command: VerifyCommand, arguments: Sequence[str]) -> int:
    if command.talks_over == "gloo" and find_launch() is None and command.strategy.world > 1:
        from app.launch.place import start_ranks

        return start_ranks(command.strategy.world, "app.verify", arguments)
    result = verify(command)
    if result is None:
        return OK  # the first rank says how it went
    print(report(result), flush=True)
    if command.out:
        command.out.mkdir(parents=True, exist_ok=True)
        (command.out / "verify.json").write_text(json.dumps(_plain(asdict(result)), indent=2, allow_nan=False) + "\n")
    return OK if result.passed else FAILED


def verify(command: VerifyCommand) -> VerifyResult | None:
    """Compute both ways and compare; under a launcher every rank calls it, and the first gets the result.

    Raises:
        ValueError: a model or strategy that does not fit.
    """
    import torch

    from app.launch.place import connect, device_of
    from app.training.exactness import TOLERANCE, compare, run_engine, run_noise, run_plain, settled_steps

    asked, launch = command.strategy, find_launch()
    trial = _trial(command, device_of(asked))
    parameters = [parameter for parameter, _ in trial.module.named_parameters()]
    plain, noise = None, []
    steps = torch.tensor([trial.steps])
    if launch is None or launch.rank == 0:
        plain, noise = run_plain(trial), run_noise(trial)
        steps[0] = settled_steps(trial, plain, noise, parameters)
    make_engine = _engine_maker(command, trial.device)
    name = command.talks_over
    if name == "threads":
        from parallel.comm.thread_comm import run_on_threads

        shorter = dataclasses.replace(trial, steps=int(steps))
        ranks = run_on_threads(asked.world, lambda communicator, _: run_engine(shorter, make_engine, communicator))[0]
    else:
        communicator = connect(asked, trial.device)
        communicator.broadcast(steps)
        shorter = dataclasses.replace(trial, steps=int(steps))
        ranks = run_engine(shorter, make_engine, communicator)
        communicator.close()
    if plain is None or ranks is None:
        return None
    if shorter.steps < trial.steps:
        plain, noise = run_plain(shorter), run_noise(shorter)
    errors = compare(plain, ranks, parameters, deferred=asked.norm_statistics == "deferred", noise=noise)
    tolerance = TOLERANCE[getattr(torch, command.dtype)]
    return VerifyResult(
        model=command.model,
        strategy=asked.name,
        ranks=asked.world,
        stages=asked.depth,
        microbatches=asked.m,
        batch=asked.batch,
        tile_px=command.tile,
        dtype=command.dtype,
        communicator=name,
        tolerance=tolerance,
        loss_error=errors.loss,
        errors=errors.by_group(),
        max_relative_error=errors.largest,
        passed=errors.passed,
        steps=shorter.steps,
        noise=max(compare(plain, [run], parameters).largest for run in noise),
        exceeded=[f"{name} ({kind})" for kind, name in errors.excesses],
    )


def _trial(command: VerifyCommand, device: torch.device) -> ExactnessTrial:
    import torch

    from app.training.exactness import ExactnessTrial
    from app.training.memory_layout import takes_channels_last
    from app.training.random_draws import refuse_draws
    from models.registry import build_model
    from parallel.schedule.microbatch import split_batch
    from parallel.schedule.shares import most_unlike
    from parallel.trace.tile_size import refuse_tile_size

    strategy = command.strategy.to_strategy(device.type)
    # Those that follow speeds are not known beforehand; replayed ones come a step each, however late in the file.
    shares = tuple(shares for _, shares in strategy.changes)
    if strategy.rebalanced:
        shares = most_unlike(strategy.m, strategy.groups)
    torch.manual_seed(command.seed)
    model = build_model(command.model, classes=command.classes, norm=command.norm, head=command.head, side=command.tile)
    sizes = tuple(map(len, split_batch(command.strategy.batch, command.strategy.m)))
    shape = (sizes[0], 3, command.tile, command.tile)
    refuse_tile_size(model, command.model, shape)
    if command.strategy.is_mixed:
        refuse_draws(model, shape)
    return ExactnessTrial(
        model,
        sizes,
        command.tile,
        getattr(torch, command.dtype),
        device,
        command.steps or (3 if command.dtype == "float64" else 1),
        command.seed,
        channels_last=command.strategy.channels_last and takes_channels_last(model, shape),
        by_boxes=strategy.policy.stream is not None,
        shares=shares,
    )


def _engine_maker(command: VerifyCommand, device: torch.device) -> MakeEngine:
    from app.training.engines import build_engine

    return functools.partial(
        build_engine,
        command.strategy.to_strategy(device.type).under(smallest=0),  # tiles are small: what is to be moved is moved
        batch=command.strategy.batch,
        tile=command.tile,
        seed=command.seed,
        device=device,
    )


def report(result: VerifyResult) -> str:
    """A table of errors, a line a top-level module, and what they come to."""
    import torch

    from app.training.exactness import CEILING, KINDS, NOISE

    ceiling = CEILING[getattr(torch, result.dtype)]
    allowed = max(result.tolerance, min(ceiling, NOISE * result.noise))
    rows = [["module", *KINDS]]
    rows += [[group, *(_number(errors.get(kind)) for kind in KINDS)] for group, errors in result.errors.items()]
    widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
    table = "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return (
        f"{table}\nloss    {_number(result.loss_error)}\n"
        f"{'passed' if result.passed else 'FAILED'}: {result.model} under {result.strategy} on {result.ranks} ranks, "
        f"{result.stages} a copy, {result.microbatches} microbatches ({result.communicator}, {result.dtype}): largest "
        f"relative error {_number(result.max_relative_error)}, allowed {_allowed(result.tolerance, allowed)}"
        f"{_why(result, ceiling)}"
    )


def _allowed(tolerance: float, most: float) -> str:
    return f"{tolerance:g}" if most <= tolerance else f"{tolerance:g} to {most:.1e}, as rounding alone does to a tensor"


def _why(result: VerifyResult, ceiling: float) -> str:
    """What is wrong, or could not be judged, by name."""
    from app.training.exactness import NOISE

    said = f"; too much in {', '.join(result.exceeded[:3])}" if result.exceeded else ""
    if result.exceeded and NOISE * result.noise > ceiling:
        said += (
            f". This model makes {result.noise:.1e} of one rounding of its tiles, and more than {ceiling:g} is never "
            f"taken for rounding: use --dtype float64, --norm group or fewer layers to judge it"
        )
    return said


def _number(error: float | None) -> str:
    return "-" if error is None else f"{error:.1e}"


def _plain(value: Any) -> Any:
    """``value`` without numbers that JSON cannot hold."""
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


if __name__ == "__main__":
    sys.exit(main())
