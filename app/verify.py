"""``python -m app.verify``: compare a strategy with the training step of one process for your model, tensor by tensor.

Takes a model and a strategy, as ``app.train`` does; returns a table of the largest relative errors, ``verify.json``,
and exit code 0 when losses, gradients, running statistics and updated parameters are those of the plain step.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from app.settings.cli import FAILED, OK, run_command
from app.settings.fields import at_least, broken, write_json
from app.settings.launcher import find_launch
from app.settings.optimization import Head, Norm
from app.settings.strategy import StrategySettings
from app.settings.strategy_errors import strategy_errors
from parallel.comm.launch import RankServer
from parallel.strategy import DELAYED, STALE
from parallel.units import number_text

if TYPE_CHECKING:
    import torch

    from app.training.plain_training import ExactnessTrial


@dataclass(frozen=True)
class VerifyCommand:
    """Compare a strategy with the plain single-process step, on random tiles: losses, gradients, running statistics,
    updated parameters and optimizer state. Every step begins from the same state. Passed: errors of at most 1e-10 in
    float64, 1e-5 in float32, relative to the largest value of the tensor."""

    strategy: StrategySettings = field(default_factory=StrategySettings)
    model: str = "resnet18"
    """As for app.train: a name of ours, smp:NAME(ENCODER), torchvision:NAME, timm:NAME or package.module:factory."""
    norm: Norm = "batch"
    """Normalisation."""
    head: Head = "average"
    """What pools the last map of a classifier."""
    classes: int = 3
    """Classes that the model tells apart."""
    tile: int = 64
    """Side of the tiles in px."""
    dtype: Literal["float64", "float32"] = "float64"
    """Type of parameters and tiles. An error above 1e-5 in float32 is called rounding where the same steps pass in
    float64."""
    steps: int = 3
    """Optimiser steps, each compared from the same state."""
    communicator: Literal["auto", "threads", "gloo", "mpi"] = "auto"
    """How ranks talk. threads: in this process, on a CPU; gloo: processes; mpi: under mpirun; auto: what fits."""
    seed: int = 0
    """Of weights, tiles and dropout."""
    out: Path | None = None
    """Folder for verify.json."""

    @property
    def talks_over(self) -> Literal["threads", "gloo", "mpi"]:
        """Return the communicator of the ranks, with ``auto`` decided."""
        if self.communicator != "auto":
            return self.communicator
        launch = find_launch()
        if launch is None:
            return "gloo" if self.strategy.name == "fsdp" or self._has_gpu_ranks else "threads"
        return "mpi" if launch.mpi else "gloo"

    @property
    def _has_gpu_ranks(self) -> bool:
        """Return whether this is a run of several ranks, some or all of them on GPUs."""
        from app.launch.place import device_kind

        strategy = self.strategy
        # As threads they would wait for each other forever: torch runs all backward passes on a GPU in one thread.
        return strategy.is_mixed or (strategy.world > 1 and device_kind(strategy.device) == "cuda")

    def validate(self) -> list[str]:
        strategy, on_threads, launch = self.strategy, self.communicator == "threads", find_launch()
        started = "nothing" if launch is None else "mpirun" if launch.mpi else "torchrun"
        fits = {"mpi": ("mpirun",), "gloo": ("nothing", "torchrun"), "threads": ("nothing",), "auto": (started,)}
        rules = {
            **at_least(self, classes=1, tile=1, steps=1),
            "--parallel auto is for training, where it is planned: name the strategy to verify": strategy.world > 1
            and strategy.needs_strategy_plan,
            "--recompute optimal is planned for a memory, by app.train or by app.plan --out; got no --recompute-runs: "
            "give the pairs under `recomputed` in plan.json, as first:last,first:last": strategy.needs_recompute_plan,
            "--stream auto is planned for a memory, by app.train: give the side of the boxes in px": (
                strategy.stream == "auto"
            ),
            f"--precision {strategy.precision} rounds far more than strategies differ: leave it out": strategy.precision
            in ("tf32", "bf16"),
            f"--norm-statistics deferred is about --norm batch; got --norm {self.norm}": self.norm != "batch"
            and strategy.norm_statistics == "deferred",
            f"--parallel {strategy.name} talks over torch.distributed: leave --communicator threads out, or use gloo": (
                strategy.name == "fsdp" and on_threads
            ),
            "ranks on GPUs are processes: leave --communicator threads out, use gloo, or add --device cpu": on_threads
            and self._has_gpu_ranks,
            f"--communicator {self.communicator} does not fit ranks started by {started}: start mpi under mpirun, gloo "
            "alone or under torchrun, threads alone": started not in fits[self.communicator],
        }
        return strategy_errors(strategy) + broken(rules)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0: exact; 1: not exact, or failed; 2: wrong usage."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    return run_command(VerifyCommand, lambda command: _run(command, arguments), arguments, "python -m app.verify")


def _run(command: VerifyCommand, arguments: Sequence[str]) -> int:
    if command.talks_over == "gloo" and find_launch() is None and command.strategy.world > 1:
        loads = "app.launch.place", "app.training.engines", "app.training.exactness", "parallel.comm.torch_comm"
        with RankServer(["app.verify", *arguments], (*loads, "torch._dynamo")) as server:
            return server.launch(command.strategy.world)
    result = verify(command)
    if result is None:
        return OK  # the first rank says how it went
    print(report(result), flush=True)
    if command.out:
        command.out.mkdir(parents=True, exist_ok=True)
        write_json(command.out / "verify.json", _plain(result))
    return OK if result["passed"] else FAILED


def verify(command: VerifyCommand) -> dict[str, Any] | None:
    """Compute both ways and compare; under a launcher every rank calls it, and the first gets the result.

    Returns:
        Content of ``verify.json``: what was compared; ``errors``, the largest relative ones by top-level module and
        kind; ``tolerance``, the largest that passes; ``exceeded``, the tensors above it, the worst first; and
        ``float64_error`` of the same steps in float64, where float32 is above the tolerance: passed if this is within
        the tolerance of float64.

    Raises:
        ValueError: a model or strategy that does not fit.
    """
    import torch

    from app.launch.place import connect, device_of
    from app.training.engines import build_engine
    from app.training.exactness import TOLERANCE, Errors, verify_engine
    from app.training.plain_training import DelayedTraining
    from parallel.comm.communicator import Communicator
    from parallel.profile.gpu import set_tf32

    asked = command.strategy
    set_tf32(False)
    trial = _trial(command, device_of(asked))
    strategy = asked.to_strategy(trial.device.type).under(smallest=0)  # tiles are small: what is to be moved is moved
    make_engine = functools.partial(
        build_engine, strategy, batch=asked.batch, tile=command.tile, seed=command.seed, device=trial.device
    )
    compare = functools.partial(verify_engine, deferred=asked.norm_statistics == "deferred")
    if strategy.stashes or asked.name == "async":
        compare = functools.partial(compare, make_reference=DelayedTraining)

    def run(communicator: Communicator, _: None = None) -> tuple[Errors | None, Errors | None]:
        """The errors, and those in float64 where float32 is above its tolerance."""
        errors = compare(trial, make_engine, communicator)
        failed = torch.tensor([errors is not None and not errors.passed and trial.dtype == torch.float32]).int()
        communicator.broadcast(failed)
        wide = dataclasses.replace(trial, dtype=torch.float64)
        return errors, compare(wide, make_engine, communicator) if failed else None

    name = command.talks_over
    if name == "threads":
        from parallel.comm.thread_comm import run_on_threads

        errors, in_float64 = run_on_threads(asked.world, run, timeout_s=asked.timeout_s)[0]
    else:
        communicator = connect(asked, trial.device)
        errors, in_float64 = run(communicator)
        communicator.close()
    if errors is None:
        return None
    rounding = in_float64 is not None and in_float64.passed and math.isfinite(errors.largest)
    return {
        "model": command.model,
        "strategy": asked.name,
        "ranks": asked.world,
        "stages": asked.depth,
        "microbatches": asked.m,
        "batch": asked.batch,
        "tile_px": command.tile,
        "dtype": command.dtype,
        "communicator": name,
        "tolerance": TOLERANCE[trial.dtype],
        "loss_error": errors.loss,
        "errors": errors.by_group(),
        "max_relative_error": errors.largest,
        "passed": errors.passed or rounding,
        "steps": trial.steps,
        "float64_error": None if in_float64 is None else in_float64.largest,
        "exceeded": [f"{name} ({kind})" for kind, name in errors.excesses],
    }


def _trial(command: VerifyCommand, device: torch.device) -> ExactnessTrial:
    import torch

    from app.training.model import refuse_draws, takes_channels_last
    from app.training.plain_training import ExactnessTrial
    from models.registry import build_model
    from parallel.schedule.shares import most_unlike, split_batch
    from parallel.trace.without_data import refuse_tile_size

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
        command.steps,
        command.seed,
        channels_last=command.strategy.channels_last and takes_channels_last(model, shape),
        by_boxes=strategy.policy.stream is not None,
        shares=shares,
    )


def report(result: dict[str, Any]) -> str:
    """A table of errors, a line a top-level module, and what they come to."""
    from app.training.exactness import KINDS

    rows = [["module", *KINDS]]
    for group, errors in result["errors"].items():
        rows.append([group, *(number_text(errors.get(kind), ".1e") for kind in KINDS)])
    widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
    table = "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    what = "{model} under {strategy} on {ranks} ranks, {stages} a copy, {microbatches} microbatches"
    return (
        f"{table}\nloss    {number_text(result['loss_error'], '.1e')}\n"
        f"{'passed' if result['passed'] else 'FAILED'}: {what.format_map(result)} ({result['communicator']}, "
        f"{result['dtype']}): largest relative error {number_text(result['max_relative_error'], '.1e')}, allowed "
        f"{result['tolerance']:g}{_remark(result)}"
        + (f"\n{DELAYED}: compared with one process that delays them alike" if result["strategy"] in STALE else "")
    )


def _remark(result: dict[str, Any]) -> str:
    """Return where an error is above the tolerance, and whether it is rounding."""
    if result["max_relative_error"] <= result["tolerance"]:
        return ""
    where = f"; above that: {', '.join(result['exceeded'][:3]) or 'the loss'}"
    if result["float64_error"] is None:
        return where
    same = f"the same steps in float64 differ by {number_text(result['float64_error'], '.1e')}"
    return f"{where}. This is {'' if result['passed'] else 'not '}rounding: {same}"


def _plain(value: Any) -> Any:
    """``value`` without numbers that JSON cannot hold."""
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


if __name__ == "__main__":
    sys.exit(main())
