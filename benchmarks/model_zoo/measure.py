"""One model of the table, in a process of its own: split, one step of GPipe, held against the plain step.

Takes an entry; gives a row for each number of stages. The ranks are threads and cut their stages from one module, so
that a model is in memory once, with two sets of gradients.
"""

from __future__ import annotations

import gc
import json
import resource
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace

import torch
from torch import Tensor, nn

from app.exactness import TOLERANCE, Outcome, Trial, compare, projected_error
from benchmarks.model_zoo.table import DEPTHS, Row
from benchmarks.model_zoo.zoo import Entry
from models.registry import build_model
from parallel.assemble import assemble
from parallel.comm.communicator import Communicator
from parallel.comm.thread_comm import run_on_threads
from parallel.microbatch import microbatch_seed
from parallel.step import Wants
from parallel.strategy import Strategy
from parallel.trace import Traced, trace

CLASSES, SEED, MICROBATCHES = 3, 0, 2
CPU = torch.device("cpu")
PATIENCE_S = 900
"""How long a rank waits for another."""


def rows_of(entry: Entry) -> Iterator[Row]:
    """One for each number of stages, as they come."""
    begun = time.perf_counter()
    row = Row(entry.model, DEPTHS[0], "failed", entry.dtype, entry.tile, entry.tiles)
    try:
        trial = _trial(entry)
        module = trial.module
        traced = trace(module, (entry.tiles, 3, entry.tile, entry.tile), dtype=trial.dtype)
        plain = _plain(trial)
    except Exception as fault:
        for depth in DEPTHS:
            yield replace(row, depth=depth, note=_reason(fault), seconds=time.perf_counter() - begun)
        return
    named = list(module.parameters())
    row = replace(
        row,
        parameters=sum(parameter.numel() for parameter in named),
        layers=len(traced.graph.layers),
        whole=_whole(traced),
        reached=f"{sum(bool(g.any()) for g in plain.gradients.values())} of {len(named)}",
    )
    for depth in DEPTHS:
        begun = time.perf_counter()
        found = _split(replace(row, depth=depth), trial, traced, plain)
        peak_gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # Linux counts it in KiB
        yield replace(found, seconds=time.perf_counter() - begun, peak_gib=peak_gib)
        module.zero_grad(set_to_none=True)
        gc.collect()  # an engine is cyclic garbage


def _split(row: Row, trial: Trial, traced: Traced, plain: Outcome) -> Row:
    """``row`` with what became of the model in ``row.depth`` stages."""
    strategy = Strategy("gpipe", row.depth, row.depth, MICROBATCHES)
    try:
        starts = strategy.partition(traced.graph).starts
    except ValueError as reason:
        return replace(row, status="refused", note=_reason(reason))
    row = replace(row, cuts=" ".join(traced.graph.layers[start].name for start in starts[1:]))
    try:
        ranks = _ranks(trial, strategy)
    except Exception as fault:
        return replace(row, status="failed", note=_reason(fault))
    errors = compare(plain, ranks, [name for name, _ in trial.module.named_parameters()])
    worst = {kind: max(of.values(), default=0.0) for kind, of in errors.of_tensors.items()}
    row = replace(row, loss=errors.loss, gradients=worst["gradients"], statistics=worst["statistics"])
    if row.largest <= TOLERANCE[trial.dtype]:
        return replace(row, status="passed")
    faulty = {name: error for of in errors.of_tensors.values() for name, error in of.items()}
    largest = sorted(faulty, key=lambda name: -faulty[name])[:3]
    return replace(row, status="inexact", note=", ".join(f"{name} {faulty[name]:.1e}" for name in largest))


def _trial(entry: Entry) -> Trial:
    """The model with random weights. A parameter that begins constant (a zero head, scales of 1 or of 1e-6) is moved
    off it, or gradients would be zero whatever is computed."""
    torch.manual_seed(SEED)
    module = build_model(entry.model, classes=CLASSES).to(getattr(torch, entry.dtype))
    with torch.no_grad():
        for parameter in module.parameters():
            if bool((parameter == parameter.flatten()[0]).all()):
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    sizes = (entry.tiles,) * MICROBATCHES
    return Trial(module, sizes, entry.tile, getattr(torch, entry.dtype), CPU, steps=1, seed=SEED, lr=0.0)


def _plain(trial: Trial) -> Outcome:
    """The step written out. The module keeps its weights and gets its buffers back; the gradients are taken out."""
    module = trial.module.train()
    before = _buffers(module)
    total = 0.0
    for i, size in enumerate(trial.sizes):
        images, targets, _ = trial.microbatch(0, i, Wants(images=True, targets=True))
        assert targets is not None
        torch.manual_seed(microbatch_seed(trial.seed, 0, i))
        loss = projected_error(module(images), targets) * (size / sum(trial.sizes))
        loss.backward()  # type: ignore[no-untyped-call]
        total += float(loss.detach())
    gradients = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    module.zero_grad(set_to_none=True)
    return Outcome([total], gradients, _exchange_buffers(module, before))


def _ranks(trial: Trial, strategy: Strategy) -> list[Outcome]:
    """The same step, each stage on a thread; what every rank has of it."""
    before = _buffers(trial.module)

    def rank(communicator: Communicator, _: None) -> Outcome:
        shape = (max(trial.sizes), 3, trial.tile, trial.tile)
        engine = assemble(
            trial.module,
            projected_error,
            lambda parameters: torch.optim.SGD(parameters, lr=trial.lr),
            communicator,
            strategy,
            shape=shape,
            batch=sum(trial.sizes),
            device=CPU,
            seed=trial.seed,
        )
        microbatches = (trial.microbatch(0, i, engine.wants(i)) for i in engine.share)
        loss = engine.step(microbatches, 0, trial.lr).loss
        engine.close()
        return Outcome([loss], engine.gradients(), {})

    ranks = run_on_threads(strategy.ranks, rank, timeout_s=PATIENCE_S)
    statistics = _exchange_buffers(trial.module, before)
    return [replace(outcome, state=statistics) for outcome in ranks]


def _buffers(module: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in module.named_buffers()}


def _exchange_buffers(module: nn.Module, values: dict[str, Tensor]) -> dict[str, Tensor]:
    """Put ``values`` into the buffers of ``module``; what they held."""
    held = _buffers(module)
    for name, buffer in module.named_buffers():
        buffer.copy_(values[name])
    return held


def _whole(traced: Traced) -> str:
    """Kinds of the modules that are layers though they are not torch's own."""
    modules = [traced.model.get_submodule(layer.module) for layer in traced.graph.layers if layer.module]
    foreign = {type(module).__name__ for module in modules if not type(module).__module__.startswith("torch.nn")}
    return ", ".join(sorted(foreign))


def _reason(fault: Exception) -> str:
    return f"{type(fault).__name__}: {' '.join(str(fault).split())}"[:400]


def main() -> None:
    torch.set_num_threads(1)
    for row in rows_of(Entry(**json.loads(sys.argv[1]))):
        print(json.dumps(asdict(row)), flush=True)


if __name__ == "__main__":
    main()
