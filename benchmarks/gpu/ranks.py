"""Ranks that share one card: two ranks split a model over Gloo through pinned memory; a step each, gradients checked.

Takes nothing; gives a row per strategy, with and without offload. Parameters are float64, so that nothing but order of
sums differs from the plain step on the same device; passed means at most 1e-10 of a tensor's largest gradient.
"""

from __future__ import annotations

import copy
import functools
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.gpu.setting import Row, Setting, attempt
from benchmarks.ranks import run_on_ranks
from benchmarks.whole_engine import whole_engine
from models.registry import build_model
from parallel.build import assemble
from parallel.comm.communicator import Communicator
from parallel.comm.local import LocalCommunicator
from parallel.engine.step import Microbatch
from parallel.memory.policy import ActivationPolicy, Offload
from parallel.strategy import Strategy

RANKS, M, SEED, RATE = 2, 4, 0, 1e-4
TOLERANCE = 1e-10
STRATEGIES: tuple[tuple[str, Offload], ...] = (
    ("gpipe", "none"),
    ("master", "overlap"),
    ("gpipe", "overlap"),
    ("master", "none"),
)
FIRST = 2
"""Of the strategies, those tried at tiny sizes."""
HEADER = ("strategy", "offload", "model", "px", "ranks", "microbatches", "step, s", "largest error", "passed")


def rows(setting: Setting) -> Iterator[Row]:
    cases = [
        {
            "strategy": name,
            "offload": offload,
            "model": setting.of("resnet50", "resnet18"),
            "px": setting.of(256, 64),
            "device": str(setting.device),
        }
        for name, offload in STRATEGIES[: setting.of(None, FIRST)]
    ]
    together = attempt({}, lambda: {"rows": _measured(setting, cases)})
    if "rows" in together:
        yield from together["rows"]
        return
    for case in cases:  # which of them it was
        yield attempt(case, lambda case=case: _measured(setting, [case])[0])


def _measured(setting: Setting, cases: list[Row]) -> list[Row]:
    """Rows of all cases, on ranks that are started once."""
    timeout_s = max(30.0, setting.left_s)
    by_rank = run_on_ranks(RANKS, "benchmarks.gpu.ranks:measure_all", cases, timeout_s=timeout_s)
    found = []
    for case, of_case in zip(cases, zip(*by_rank, strict=True), strict=True):
        error = max(rank["error"] for rank in of_case)
        step_s = max(rank["step_s"] for rank in of_case)
        found.append({**case, "step_s": step_s, "error": error, "passed": error <= TOLERANCE})
    return found


def measure_all(communicator: Communicator, cases: list[Row]) -> list[dict[str, float]]:
    """What ``measure`` gives of each case."""
    return [measure(communicator, case) for case in cases]


def measure(communicator: Communicator, case: dict[str, Any]) -> dict[str, float]:
    """Seconds of the second step, and the largest error of this rank's gradients of the first."""
    device = torch.device(case["device"])
    torch.manual_seed(SEED)
    module = build_model(case["model"], classes=2).double()
    shape = (1, 3, case["px"], case["px"])
    tiles = [torch.randn(shape, dtype=torch.float64) for _ in range(M)]
    parts = [Microbatch(tile.to(device), torch.tensor([i % 2], device=device), shape) for i, tile in enumerate(tiles)]
    expected = _plain_gradients(copy.deepcopy(module).to(device), parts)
    smallest = 1 if device.type == "cpu" else 1 << 16
    engine = assemble(
        module,
        F.cross_entropy,
        partial(torch.optim.SGD, lr=RATE),
        communicator,
        Strategy(
            case["strategy"], RANKS, RANKS, M, policy=ActivationPolicy(offload=case["offload"], smallest=smallest)
        ),
        shape=shape,
        batch=M,
        device=device,
        seed=SEED,
    )
    wanted = [
        Microbatch(
            part.images if engine.wants(i).images else None, part.targets if engine.wants(i).targets else None, shape
        )
        for i, part in enumerate(parts)
    ]
    engine.step(wanted, 0, 0.0)
    error = max(
        float((gradient - expected[name]).abs().max() / expected[name].abs().max().clamp_min(1e-30))
        for name, gradient in engine.gradients().items()
    )
    communicator.barrier()
    began = time.perf_counter()
    engine.step(wanted, 1, 0.0)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    step_s = time.perf_counter() - began
    engine.close()
    return {"step_s": step_s, "error": error}


def _plain_gradients(module: torch.nn.Module, parts: list[Microbatch]) -> dict[str, torch.Tensor]:
    rule, shape = functools.partial(torch.optim.SGD, lr=RATE), parts[0].shape
    device = next(module.parameters()).device
    plain = whole_engine(
        module, F.cross_entropy, rule, LocalCommunicator(), batch=M, m=M, shape=shape, device=device, seed=SEED
    )
    plain.step(parts, 0, 0.0)
    return {name: gradient.clone() for name, gradient in plain.gradients().items()}


def line(row: Row) -> tuple[str, ...]:
    return (
        row["strategy"],
        row["offload"],
        row["model"],
        str(row["px"]),
        str(RANKS),
        str(M),
        f"{row['step_s']:.3f}",
        f"{row['error']:.1e}",
        "yes" if row["passed"] else "NO",
    )
