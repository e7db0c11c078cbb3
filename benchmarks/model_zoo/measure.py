"""One model of the table, in a process of its own: a step of ``app.train``'s engines, held against a plain loop.

Takes an entry; gives a row for each way of computing it. The ranks are threads; engine, keeping and layout are what
``app.train`` builds from its defaults.
"""

from __future__ import annotations

import gc
import resource
import time
import warnings
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from app.settings.strategy import StrategySettings
from app.training.engines import build_engine
from app.training.exactness import Errors, ExactnessTrial, PlainTraining, StepOutcome, verify_engine
from benchmarks.model_zoo.table import Row
from benchmarks.model_zoo.zoo import Entry
from models.registry import build_model
from parallel.comm.communicator import Communicator
from parallel.comm.thread_comm import run_on_threads
from parallel.trace.trace import Traced, trace

ROOT = Path(__file__).parents[2]

CLASSES, SEED, MICROBATCHES = 3, 0, 2
CPU = torch.device("cpu")
PATIENCE_S = 900
"""How long a rank waits for another."""


def rows_of(entry: Entry) -> Iterator[Row]:
    """One for each way, as they come."""
    begun = time.process_time()
    row = Row(entry.name, entry.ways[0], entry.library, "failed", entry.dtype, entry.tile, entry.tiles)
    layout = ""
    try:
        trial = _trial(entry)
        try:
            plain = _plain(trial)
        except RuntimeError as fault:  # of a view of what is channels_last
            layout = f"with --no-channels-last: else {_reason(fault)}"
            trial = replace(trial, channels_last=False)
            plain = _plain(trial)
    except Exception as fault:
        for way in entry.ways:
            yield replace(row, way=way, note=f"plain step: {_reason(fault)}", seconds=time.process_time() - begun)
        return
    row = replace(
        row,
        note=layout,
        parameters=sum(parameter.numel() for parameter in trial.module.parameters()),
        reached=f"{sum(bool(g.any()) for g in plain.gradients.values())} of {len(list(trial.module.parameters()))}",
    )
    try:
        traced = trace(trial.fresh_module(), (entry.tiles, 3, entry.tile, entry.tile), dtype=trial.dtype)
        row = replace(row, layers=len(traced.graph.layers), whole=_whole(traced))
        del traced
    except Exception:  # the ways below say whether it matters to them, and how
        gc.collect()
    for way in entry.ways:
        begun = time.process_time()
        found = _compared(replace(row, way=way), trial)
        peak_gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # Linux counts it in KiB
        yield replace(found, seconds=time.process_time() - begun, peak_gib=peak_gib)
        gc.collect()  # an engine is cyclic garbage


def _compared(row: Row, trial: ExactnessTrial) -> Row:
    """``row`` with what became of the model computed as ``row.way`` says."""
    try:
        errors = _errors(trial, settings_of(row.way, trial))
    except ValueError as reason:
        return replace(row, status="refused", note=_reason(reason))
    except Exception as fault:
        return replace(row, status="failed", note=_reason(fault))
    state = max(map(errors.of_kind, ("parameters", "statistics", "optimizer")))
    row = replace(row, loss=errors.loss, gradients=errors.of_kind("gradients"), state=state)
    if errors.passed:
        return replace(row, status="exact")
    worst = ", ".join(f"{name} {errors.of_tensors[kind][name]:.1e}" for kind, name in errors.excesses[:3])
    return replace(row, status="wrong", note=worst or "loss")


def settings_of(way: str, trial: ExactnessTrial) -> StrategySettings:
    """What the flags of ``app.train`` would say."""
    batch = sum(trial.sizes)
    common = partial(
        StrategySettings, batch=batch, microbatches=len(trial.sizes), channels_last=trial.channels_last, device="cpu"
    )
    match way.split():
        case ["recompute"]:
            return common("single", recompute="block")
        case ["spatial", grid]:
            return common("spatial", ranks=int(grid[0]), grid=grid)
        case [ranks, "stages"]:
            return common("1f1b", ranks=int(ranks))
        case _:
            return common(way, ranks=2)  # type: ignore[arg-type]


def _trial(entry: Entry) -> ExactnessTrial:
    """The model with random weights. A parameter that begins constant (a zero head, scales of 1 or of 1e-6) is moved
    off it, or gradients would be zero whatever is computed."""
    torch.manual_seed(SEED)
    dtype = getattr(torch, entry.dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what libraries say of themselves
        module = build_model(entry.model, classes=CLASSES)
    with torch.no_grad():
        for parameter in module.parameters():
            if bool((parameter == parameter.flatten()[0]).all()):
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    sizes = (entry.tiles,) * MICROBATCHES
    return ExactnessTrial(module, sizes, entry.tile, dtype, CPU, steps=entry.steps, seed=SEED, channels_last=True)


def _plain(trial: ExactnessTrial) -> StepOutcome:
    """The first step of one process."""
    return PlainTraining(trial).step(0)


def _errors(trial: ExactnessTrial, settings: StrategySettings) -> Errors:
    """Errors of an engine's steps."""
    strategy = settings.to_strategy("cpu").under(smallest=0)
    make_engine = partial(build_engine, strategy, batch=settings.batch, tile=trial.tile, seed=trial.seed, device=CPU)

    def rank(communicator: Communicator, _: None) -> Errors | None:
        return verify_engine(trial, make_engine, communicator)

    errors = run_on_threads(settings.world, rank, timeout_s=PATIENCE_S)[0]
    assert errors is not None
    return errors


def _whole(traced: Traced) -> str:
    """Kinds of the modules that are layers though they are not torch's own."""
    modules = [traced.model.get_submodule(layer.module) for layer in traced.graph.layers if layer.module]
    foreign = {type(module).__name__ for module in modules if not type(module).__module__.startswith("torch.nn")}
    return ", ".join(sorted(foreign))


def _reason(fault: Exception) -> str:
    """Its words, with files of the project as they are called in it."""
    return f"{type(fault).__name__}: {' '.join(str(fault).split())}".replace(f"{ROOT}/", "")[:600]
