"""Bytes that autograd keeps for backward under each schedule, on every rank: measured, by formula, and by `simulate`.

Takes nothing; gives peak bytes for ResNet-50 on two and on four ranks, which are threads of this process. Exit code 1
if a measured peak is more than a tenth off.

    python -m benchmarks.plan_accuracy.activation_bytes [--px 512] [--model resnet50] [--depths 2 4] [--write]
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.results import finish, markdown_table, measured_on, parser_of, publish, results, write_json
from benchmarks.whole_engine import cpu_engine
from models.registry import build_model
from parallel.comm.communicator import Communicator
from parallel.comm.thread_comm import run_on_threads
from parallel.engine.step import Microbatch
from parallel.graph.partition import partition_equal
from parallel.memory.policy import KEEP_ALL, ActivationPolicy
from parallel.offload.packing import ActivationMeter
from parallel.schedule.registry import SCHEDULES
from parallel.schedule.simulate import simulate
from parallel.schedule.timeline import StageCost
from parallel.strategy import Strategy
from parallel.trace.cut import cut_stage
from parallel.trace.trace import trace

M, MIB, DEVIATION = 4, 2**20, 0.10
FORMULAS: dict[str, tuple[str, Callable[[Sequence[int], int], int]]] = {
    "mp-basic": ("A_k", lambda a, k: a[k]),
    "gpipe": ("m A_k", lambda a, k: M * a[k]),
    "1f1b": ("min(m, D - k) A_k", lambda a, k: min(M, len(a) - k) * a[k]),
    "mast": ("max(A_k, A_{D-1-k})", lambda a, k: max(a[k], a[len(a) - 1 - k])),
    "master": ("max(A_k, A_{D-1-k})", lambda a, k: max(a[k], a[len(a) - 1 - k])),
}
"""Schedule -> peak on rank k, from the activations of one microbatch in each stage."""
Row = dict[str, Any]


def build(model: str) -> nn.Module:
    torch.manual_seed(0)
    return build_model(model, classes=2)


def stage_bytes(model: str, px: int, stages: int) -> list[int]:
    """Return what one microbatch alone leaves in each stage, the loss with the last: A_k."""
    traced = trace(build(model), (1, 3, px, px))
    partition = partition_equal(traced.graph, stages)
    values: dict[str, Any] = {partition.inputs_of(0)[0]: torch.randn(1, 3, px, px)}
    kept = []
    for number in range(stages):
        stage = cut_stage(traced, partition, number).train()
        meter = ActivationMeter()
        with meter.watching((*stage.parameters(), *stage.buffers())):
            given = stage(*(values[name] for name in stage.inputs))
            if number == stages - 1:
                given = (F.cross_entropy(given[0], torch.zeros(1, dtype=torch.int64)),)
        kept.append(meter.peak_bytes)
        # Received values are leaves of the next stage, as they are on another rank.
        values |= {name: value.detach().requires_grad_() for name, value in zip(stage.outputs, given, strict=True)}
    return kept


def peak_bytes(strategy: Strategy, model: str, px: int, communicator: Communicator, _: Any) -> tuple[int, Any]:
    """Return the peak on this rank in one step, and the schedule that was run."""
    shape, meter = (1, 3, px, px), ActivationMeter()
    rule = partial(torch.optim.SGD, lr=0.0)
    engine = cpu_engine(build(model), F.cross_entropy, rule, communicator, strategy, shape, strategy.m, meter)
    labels = torch.zeros(strategy.m, 1, dtype=torch.int64)
    engine.step([Microbatch(torch.randn(shape), labels[i], shape) for i in engine.share], 0, 0.0)
    return meter.peak_bytes, engine.schedule


def measure(schedule: str, depth: int, recompute: bool, model: str, px: int, kept: dict[int, list[int]]) -> Row:
    """Return a row: bytes by rank.

    Args:
        kept: number of stages -> A_k.
    """
    chunks = 2 if SCHEDULES[schedule].chunks else 1
    policy = ActivationPolicy("stage") if recompute else KEEP_ALL
    m = 2 if schedule == "mast" else M
    strategy = Strategy(schedule, depth, depth, m, chunks=chunks, policy=policy)
    ranks = run_on_threads(depth, partial(peak_bytes, strategy, model, px), timeout_s=600)
    costs = [StageCost(1.0, 2.0, 1.0, 1.0, activation_bytes=size) for size in kept[depth * chunks]]
    text, formula = FORMULAS.get(schedule, ("", None)) if not recompute else ("", None)
    simulated = simulate(ranks[0][1], strategy.mesh, costs).peak_bytes
    assert simulated is not None
    row = {
        "depth": depth,
        "schedule": schedule + ", recomputed" * recompute,
        "m": m,
        "measured": [measured for measured, _ in ranks],
        "formula": text,
        "formula_bytes": [formula(kept[depth], rank) for rank in range(depth)] if formula else [],
        "simulated": [simulated[rank] for rank in range(depth)],
    }
    print(f"D = {depth}, {row['schedule']}: {_mib(row['measured'])} MiB", flush=True)
    return row


def deviations(row: Row) -> list[float]:
    """Return how far the measured bytes of each rank are from those of ``simulate`` and of the formula."""
    expected = [row["simulated"], *([row["formula_bytes"]] if row["formula_bytes"] else [])]
    pairs = [pair for sizes in expected for pair in zip(row["measured"], sizes, strict=True)]
    return [measured / size - 1 for measured, size in pairs if size]  # a tiny stage may keep nothing


def _mib(sizes: Sequence[int]) -> str:
    return ", ".join(f"{size / MIB:.0f}" for size in sizes)


def report(rows: Sequence[Row], model: str, px: int) -> str:
    """Return the table: a row for each schedule and depth, ranks from left to right."""
    lines = [
        (
            str(row["depth"]),
            row["schedule"],
            str(row["m"]),
            _mib(row["measured"]),
            row["formula"],
            _mib(row["formula_bytes"]),
            _mib(row["simulated"]),
            f"{max(deviations(row), key=abs):+.1%}",
        )
        for row in rows
    ]
    header = ("D", "schedule", "m", "measured, MiB, rank 0, 1, ...", "formula", "gives", "simulated")
    table = markdown_table((*header, "largest deviation"), lines)
    about = f"{model}, {px} px, one tile a microbatch.\n"
    return results(about, table)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--model", default="resnet50")
    parser.add_argument("--px", type=int, default=512, help="side of a tile")
    parser.add_argument("--depths", type=int, nargs="+", default=[2, 4], help="numbers of ranks")
    asked = parser.parse_args()
    torch.set_num_threads(1)  # the ranks are threads
    rows = []
    for depth in asked.depths:
        kept = {stages: stage_bytes(asked.model, asked.px, stages) for stages in (depth, 2 * depth)}
        for recompute, schedule in itertools.product((False, True), SCHEDULES):
            rows.append(measure(schedule, depth, recompute, asked.model, asked.px, kept))
    write_json("activation_bytes", {"rows": rows, "environment": measured_on()})
    publish(__file__, report(rows, asked.model, asked.px), asked.write, "activation_bytes")
    far = [(row, error) for row in rows if abs(error := max(deviations(row), key=abs)) > DEVIATION]
    finish(f"{row['schedule']} on {row['depth']} ranks: {error:+.1%}" for row, error in far)


if __name__ == "__main__":
    main()
