"""Peak bytes of every rank in training, measured beside what ``parallel.memory.rank_bytes`` predicts.

Takes nothing; gives a table of models, tiles and strategies. Each rank is a process of its own. Measured is the growth
of its resident memory over a baseline taken after imports and one small step, up to the highest point of three steps of
AdamW. What the C library keeps of freed memory is measured beside it for one rank. Other programs do not disturb it.

    python -m benchmarks.plan_accuracy.memory [--models NAME ...] [--px 512 ...] [--ranks 1 ...] [--strategies NAME ...]
        [--write]

With ``--write``, cases measured before stay in the table until they are measured again.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import itertools
import json
import os
import statistics
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.machine import measured_on
from benchmarks.ranks import run_on_ranks
from benchmarks.results import OUT, markdown_table, parser_of, publish, results
from models.registry import build_model
from parallel.build import assemble
from parallel.comm.communicator import Communicator
from parallel.engine.step import Microbatch, TrainingEngine
from parallel.graph.partition import Partition
from parallel.memory.rank_bytes import RankBytes, rank_bytes
from parallel.memory.stage_memory import StageMemory
from parallel.strategy import WHOLE, Strategy
from parallel.trace.trace import trace

MODELS = ("resnet50", "unet", "torchvision:densenet121")
STRATEGIES = ("ddp", "gpipe", "1f1b", "master", "bidirectional")
CLASSES, STEPS, SLOTS, M = 2, 3, 2, 4
MOST = 6 * 2**30
"""Bytes over all ranks; a case that is predicted to take more is left out."""
MIB = 2**20
MMAPPED = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
"""Has glibc return freed memory at once, as an allocator that knows tensors would; by default it keeps what is smaller
than 32 MiB for later use."""


class WithLoss(nn.Module):
    """A model and its loss, to be traced together."""

    def __init__(self, model: nn.Module, targets: Tensor) -> None:
        super().__init__()
        self.model = model
        self.register_buffer("targets", targets)

    def forward(self, images: Tensor) -> Tensor:
        return F.cross_entropy(self.model(images), self.targets)


def targets_of(model: str, px: int) -> Tensor:
    return torch.zeros((1, px, px) if model.startswith("unet") else (1,), dtype=torch.int64)


def predict(case: dict[str, Any]) -> list[RankBytes]:
    """Of every rank."""
    with torch.device("meta"):
        model = build_model(case["model"], classes=CLASSES)
    shape = (1, 3, case["px"], case["px"])
    graph = trace(WithLoss(model, targets_of(case["model"], case["px"])), shape).graph
    name, ranks, m = case["strategy"], case["ranks"], case["m"]
    strategy = Strategy(name, ranks, 1 if name in WHOLE else ranks, m)
    cut = strategy.partition(trace(model, shape).graph)
    partition = Partition(graph, cut.starts)  # the loss comes after everything else
    stages = StageMemory(graph).kept(partition)
    return rank_bytes(stages, strategy.mesh, strategy.schedule(partition.links), slots=SLOTS)


def resident(key: str) -> int:
    """Bytes of this process: "VmRSS" now, "VmHWM" at most since ``forget_peak``."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024


def settle() -> None:
    """Give freed memory back, and let the highest point start anew."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")


def measure(communicator: Communicator, case: dict[str, Any]) -> int:
    """Bytes of this rank at most, over the baseline."""
    torch.manual_seed(0)
    small = Work(communicator, {**case, "model": "torchvision:resnet18", "px": 64})
    small.run()
    del small
    settle()
    baseline = resident("VmRSS")
    work = Work(communicator, case)
    settle()
    work.run()
    return resident("VmHWM") - baseline


class Work:
    """A model at work on this rank."""

    def __init__(self, communicator: Communicator, case: dict[str, Any]) -> None:
        self._case = case
        self._engine = _engine(communicator, case)

    def run(self) -> None:
        for step in range(STEPS):
            self._engine.step(self._microbatches(), step, 1e-4)
        self._engine.close()

    def _microbatches(self) -> Iterator[Microbatch]:
        px = self._case["px"]
        for _ in self._engine.share:
            yield Microbatch(torch.randn(1, 3, px, px), targets_of(self._case["model"], px), (1, 3, px, px))


def _engine(communicator: Communicator, case: dict[str, Any]) -> TrainingEngine:
    model = build_model(case["model"], classes=CLASSES)
    optimizer = partial(torch.optim.AdamW, lr=1e-4)
    name, m = case["strategy"], case["m"]
    depth = 1 if name in WHOLE else case["ranks"]
    strategy = Strategy(name, case["ranks"], depth, m)
    shape = (1, 3, case["px"], case["px"])
    return assemble(
        model, F.cross_entropy, optimizer, communicator, strategy, shape=shape, batch=m, device=torch.device("cpu")
    )


@contextlib.contextmanager
def environment(values: dict[str, str]) -> Iterator[None]:
    """Of processes started in this block."""
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def cases(models: list[str], sizes: list[int], worlds: list[int], strategies: list[str]) -> Iterator[dict[str, Any]]:
    for model, px, ranks in itertools.product(models, sizes, worlds):
        for strategy in strategies if ranks > 1 else ("single",):
            yield {"model": model, "px": px, "ranks": ranks, "strategy": strategy, "m": M if ranks > 1 else 2}


def measure_case(case: dict[str, Any]) -> dict[str, Any] | None:
    """Its row; None where it would take too much."""
    predicted = [rank.total for rank in predict(case)]
    if sum(predicted) > MOST:
        return None
    target = "benchmarks.plan_accuracy.memory:measure"
    with environment(MMAPPED):
        measured = run_on_ranks(case["ranks"], target, case)
    usual = run_on_ranks(1, target, case) if case["ranks"] == 1 else []
    return {**case, "predicted": predicted, "measured": measured, "usual": usual}


def errors(row: dict[str, Any]) -> list[float]:
    """Of the prediction, relative to what was measured, by rank."""
    return [guess / real - 1 for guess, real in zip(row["predicted"], row["measured"], strict=True)]


def _key(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["model"], row["px"], row["ranks"], ("single", *STRATEGIES).index(row["strategy"])


def _line(row: dict[str, Any]) -> tuple[str, ...]:
    return (
        row["model"].removeprefix("torchvision:"),
        str(row["px"]),
        str(row["ranks"]),
        row["strategy"],
        *(", ".join(f"{size / MIB:.0f}" for size in row[key]) for key in ("measured", "predicted")),
        f"{max(errors(row), key=abs):+.1%}",
    )


def report(result: dict[str, Any]) -> str:
    table = markdown_table(
        ("model", "px", "ranks", "strategy", "measured, MiB, rank 0, 1, ...", "predicted", "largest error"),
        [_line(row) for row in result["rows"]],
    )
    every = [abs(each) for row in result["rows"] for each in errors(row)]
    kept = [row["usual"][0] / row["measured"][0] - 1 for row in result["rows"] if row["usual"]]
    defaults = f"{min(kept):.0%} to {max(kept):.0%} more for later use" if kept else "more, measured on one rank"
    about = (
        f"One tile a microbatch; {M} microbatches, 2 on one rank. Error of the prediction over {len(every)} ranks: "
        f"median {statistics.median(every):.1%}, largest {max(every):.1%}. Left to its defaults, glibc keeps "
        f"{defaults}.\n"
    )
    return results("python -m benchmarks.plan_accuracy.memory --write", about, table)


def main() -> None:
    parser = parser_of(__doc__, writes=False)
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--px", type=int, nargs="+", default=[512, 768], help="side of a tile")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4], help="numbers of ranks")
    parser.add_argument("--write", action="store_true", help="add to the table of README.md")
    parser.add_argument("--strategies", nargs="+", default=list(STRATEGIES), help="on several ranks")
    arguments = parser.parse_args()
    file = OUT / "memory.json"
    kept = json.loads(file.read_text())["rows"] if arguments.write and file.exists() else []
    rows = {_key(row): row for row in kept}
    OUT.mkdir(exist_ok=True)
    for case in cases(arguments.models, arguments.px, arguments.ranks, arguments.strategies):
        row = measure_case(case)
        if row is not None:
            rows[_key(row)] = row
            print(*_line(row), flush=True)
            result = {"rows": sorted(rows.values(), key=_key), "environment": measured_on()}
            if arguments.write:
                file.write_text(json.dumps(result, indent=2) + "\n")
    text = report({"rows": sorted(rows.values(), key=_key)})
    publish(__file__, text, arguments.write, "memory")


if __name__ == "__main__":
    main()
