"""One model of the table, in a process of its own: a step of ``app.train``'s engines, held against a plain loop.

Takes an entry; gives a row for each way of computing it. The ranks are threads; engine, keeping and layout are what
``app.train`` builds from its defaults.
"""

from __future__ import annotations

import copy
import gc
import math
import resource
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from app.settings.strategy import StrategySettings
from app.training.engines import build_engine
from app.training.exactness import TOLERANCE, ExactnessTrial, StepsResult, run_engine
from app.training.projected_error import ProjectedError
from benchmarks.model_zoo.table import WAYS, Row
from benchmarks.model_zoo.zoo import Entry
from models.registry import build_model
from parallel.comm.communicator import Communicator
from parallel.comm.thread_comm import run_on_threads
from parallel.engine.step import Wants
from parallel.schedule.microbatch import microbatch_seed
from parallel.trace.trace import Traced, trace

ROOT = Path(__file__).parents[2]

CLASSES, SEED, MICROBATCHES = 3, 0, 2
CPU = torch.device("cpu")
PATIENCE_S = 900
"""How long a rank waits for another."""

SMALL = 1e-2
"""A tensor smaller than this share of the largest of its kind in the model: its error counts relative to that share.
Deep models round at 1e-14 of the largest gradient; a wrong one of 1e-8 of it is seen in float64 nevertheless."""


def rows_of(entry: Entry) -> Iterator[Row]:
    """One for each way, as they come."""
    begun = time.process_time()
    row = Row(entry.name, WAYS[0], entry.library, "failed", entry.dtype, entry.tile, entry.tiles)
    layout = ""
    try:
        trial = _trial(entry)
        try:
            plain = _plain(trial)
        except RuntimeError as fault:  # of a view of what is channels_last
            layout = f"with --developer channels-last=false: else {_reason(fault)}"
            trial = replace(trial, channels_last=False)
            plain = _plain(trial)
    except Exception as fault:
        for way in WAYS:
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
    for way in WAYS:
        begun = time.process_time()
        found = _compared(replace(row, way=way), trial, plain)
        peak_gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # Linux counts it in KiB
        yield replace(found, seconds=time.process_time() - begun, peak_gib=peak_gib)
        gc.collect()  # an engine is cyclic garbage


def _compared(row: Row, trial: ExactnessTrial, plain: StepsResult) -> Row:
    """``row`` with what became of the model computed as ``row.way`` says."""
    try:
        ranks = _ranks(trial, settings_of(row.way, trial))
    except ValueError as reason:
        return replace(row, status="refused", note=_reason(reason))
    except Exception as fault:
        return replace(row, status="failed", note=_reason(fault))
    errors = {
        "gradients": relative_errors(plain.gradients, [rank.gradients for rank in ranks]),
        "state": relative_errors(plain.state, [ranks[0].state]),
    }
    loss = max(abs(rank.losses[0] / plain.losses[0] - 1) for rank in ranks)
    row = replace(row, loss=loss, **{kind: max(of.values(), default=0.0) for kind, of in errors.items()})
    if row.largest <= TOLERANCE[trial.dtype]:
        return replace(row, status="exact")
    every = {
        name: max(of.get(name, 0.0) for of in errors.values()) for name in {**errors["gradients"], **errors["state"]}
    }
    largest = sorted(every, key=lambda name: -every[name])[:3]
    return replace(row, status="wrong", note=", ".join(f"{name} {every[name]:.1e}" for name in largest))


def settings_of(way: str, trial: ExactnessTrial) -> StrategySettings:
    """What the flags of ``app.train`` would say."""
    batch = sum(trial.sizes)
    common = partial(
        StrategySettings, batch=batch, microbatches=len(trial.sizes), channels_last=trial.channels_last, device="cpu"
    )
    if way == "recompute":
        return common("single", recompute="block")
    return common("1f1b", ranks=int(way.split()[0]))


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
    return ExactnessTrial(module, sizes, entry.tile, dtype, CPU, steps=1, seed=SEED, channels_last=True)


def _plain(trial: ExactnessTrial) -> StepsResult:
    """The step written out: nothing of ours but tiles, seeds and the loss."""
    module = trial.fresh_module().train()
    optimizer = trial.make_optimizer(module.named_parameters())
    total = 0.0
    for i, size in enumerate(trial.sizes):
        images, targets, _ = trial.microbatch(0, i, Wants(images=True, targets=True))
        assert targets is not None
        torch.manual_seed(microbatch_seed(trial.seed, 0, i))
        loss = ProjectedError()(module(images), targets) * (size / sum(trial.sizes))
        loss.backward()  # type: ignore[no-untyped-call]
        total += float(loss.detach())
    gradients = {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
    optimizer.step()
    return StepsResult([total], gradients, copy.copy(module.state_dict()))


def _ranks(trial: ExactnessTrial, settings: StrategySettings) -> list[StepsResult]:
    """The same step by an engine; what every rank has of it."""
    strategy = settings.to_strategy("cpu").under(smallest=0)
    make_engine = partial(build_engine, strategy, batch=settings.batch, tile=trial.tile, seed=trial.seed, device=CPU)

    def rank(communicator: Communicator, _: None) -> list[StepsResult] | None:
        return run_engine(trial, make_engine, communicator)

    outcomes = run_on_threads(settings.world, rank, timeout_s=PATIENCE_S)[0]
    assert outcomes is not None
    return outcomes


def relative_errors(expected: Mapping[str, Tensor], found: Sequence[Mapping[str, Tensor]]) -> dict[str, float]:
    """Name -> largest error on any rank that has the tensor; one that is missing counts as zeros.

    Relative to the largest value of the tensor, and at least to ``SMALL`` of the largest of all.
    """
    sizes = {name: _largest(value) for name, value in expected.items()}
    floor = SMALL * max(sizes.values(), default=0.0)
    errors = {}
    for name in {name for values in (expected, *found) for name in values}:
        values = [rank[name] for rank in found if name in rank]
        reference = expected.get(name, torch.zeros_like(values[0]) if values else None)
        assert reference is not None
        wide = torch.promote_types(reference.dtype, torch.float64)  # flags and counts cannot be subtracted
        distance = max(
            _largest(value.to(wide) - reference.to(wide)) for value in values or [torch.zeros_like(reference)]
        )
        errors[name] = distance / (max(sizes.get(name, 0.0), floor) or 1.0)
    return errors


def _largest(value: Tensor) -> float:
    """Size of the largest value; infinite where one is not a number."""
    largest = float(value.to(torch.promote_types(value.dtype, torch.float64)).abs().max()) if value.numel() else 0.0
    return largest if largest < math.inf else math.inf


def _whole(traced: Traced) -> str:
    """Kinds of the modules that are layers though they are not torch's own."""
    modules = [traced.model.get_submodule(layer.module) for layer in traced.graph.layers if layer.module]
    foreign = {type(module).__name__ for module in modules if not type(module).__module__.startswith("torch.nn")}
    return ", ".join(sorted(foreign))


def _reason(fault: Exception) -> str:
    """Its words, with files of the project as they are called in it."""
    return f"{type(fault).__name__}: {' '.join(str(fault).split())}".replace(f"{ROOT}/", "")[:600]
