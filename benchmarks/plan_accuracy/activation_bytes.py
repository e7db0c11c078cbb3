"""What autograd keeps for backward under each schedule, on every rank: measured, against the formulas and `simulate`.

Takes nothing; gives peak bytes for ResNet-50 on two and on four ranks, which are threads of this process.

    python -m benchmarks.plan_accuracy.activation_bytes [--px 512] [--model resnet50] [--depths 2 4] [--write]
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.machine import measured_on
from benchmarks.results import markdown_table, parser_of, publish, results, write_json
from models.registry import build_model
from parallel.build import assemble
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

M, CLASSES = 4, 2
DEVIATION = 0.10
MIB = 2**20

FORMULAS: dict[str, tuple[str, Callable[[Sequence[int], int], int]]] = {
    "mp-basic": ("A_k", lambda a, k: a[k]),
    "gpipe": ("m A_k", lambda a, k: M * a[k]),
    "1f1b": ("min(m, D - k) A_k", lambda a, k: min(M, len(a) - k) * a[k]),
    "mast": ("max(A_k, A_{D-1-k})", lambda a, k: max(a[k], a[len(a) - 1 - k])),
    "master": ("max(A_k, A_{D-1-k})", lambda a, k: max(a[k], a[len(a) - 1 - k])),
}
"""Schedule -> peak on rank k, from the activations of one microbatch in each stage."""


@dataclass(frozen=True)
class Case:
    """A schedule on ``depth`` ranks."""

    schedule: str
    depth: int
    recompute: bool

    @property
    def strategy(self) -> Strategy:
        chunks = 2 if SCHEDULES[self.schedule].chunks else 1
        m = 2 if self.schedule == "mast" else M
        policy = ActivationPolicy("stage") if self.recompute else KEEP_ALL
        return Strategy(self.schedule, self.depth, self.depth, m, chunks=chunks, policy=policy)

    @property
    def name(self) -> str:
        return self.schedule + (", recomputed" if self.recompute else "")


def build(model: str) -> nn.Module:
    torch.manual_seed(0)
    return build_model(model, classes=CLASSES)


def stage_bytes(model: str, px: int, stages: int) -> list[int]:
    """What one microbatch alone leaves in each stage, the loss with the last: A_k."""
    traced = trace(build(model), (1, 3, px, px))
    partition = partition_equal(traced.graph, stages)
    values: dict[str, Any] = {partition.inputs_of(0)[0]: torch.randn(1, 3, px, px)}
    found = []
    for number in range(stages):
        stage = cut_stage(traced, partition, number).train()
        meter = ActivationMeter(stage)
        with meter.watching():
            given = stage(*(values[name] for name in stage.inputs))
            if number == stages - 1:
                given = (F.cross_entropy(given[0], torch.zeros(1, dtype=torch.int64)),)
        found.append(meter.peak_bytes)
        # Received values are leaves of the next stage, as they are on another rank.
        values |= {name: value.detach().requires_grad_() for name, value in zip(stage.outputs, given, strict=True)}
    return found


def peak_bytes(case: Case, model: str, px: int, communicator: Communicator, _: Any) -> tuple[int, Any]:
    """Peak on this rank in one step, and the schedule that was walked."""
    shape = (1, 3, px, px)
    meter = ActivationMeter()
    engine = assemble(
        build(model),
        F.cross_entropy,
        partial(torch.optim.SGD, lr=0.0),
        communicator,
        case.strategy,
        shape=shape,
        batch=case.strategy.m,
        device=torch.device("cpu"),
        meter=meter,
    )
    labels = torch.zeros(case.strategy.m, 1, dtype=torch.int64)
    engine.step([Microbatch(torch.randn(shape), labels[i], shape) for i in engine.share], 0, 0.0)
    return meter.peak_bytes, engine.schedule


def measure(case: Case, model: str, px: int, kept: Sequence[int], kept_alone: Sequence[int]) -> list[dict[str, Any]]:
    """A row for each rank.

    Args:
        kept: A_k of the strategy's stages.
        kept_alone: A_k where there are as many stages as ranks, for the formulas.
    """
    strategy = case.strategy
    ranks = run_on_threads(case.depth, partial(peak_bytes, case, model, px), timeout_s=600)
    costs = [StageCost(1.0, 2.0, 1.0, 1.0, activation_bytes=size) for size in kept]
    simulated = simulate(ranks[0][1], strategy.mesh, costs).peak_bytes
    assert simulated is not None
    rows = []
    for rank, (measured, _) in enumerate(ranks):
        text, formula = FORMULAS.get(case.schedule, ("", None))
        if case.recompute:
            text, formula = "", None
        rows.append(
            {
                "schedule": case.name,
                "depth": case.depth,
                "m": strategy.m,
                "rank": rank,
                "measured": measured,
                "simulated": simulated[rank],
                "formula": text,
                "formula_bytes": formula(kept_alone, rank) if formula else None,
            }
        )
    return rows


def deviations(row: dict[str, Any]) -> list[float]:
    """Of the measured bytes from those of ``simulate`` and, where there is one, of the formula."""
    expected = [row["simulated"], *([row["formula_bytes"]] if row["formula_bytes"] else [])]
    return [row["measured"] / bytes_ - 1 for bytes_ in expected]


def measure_all(model: str, px: int, depths: Sequence[int]) -> list[dict[str, Any]]:
    rows = []
    for depth in depths:
        kept_alone = stage_bytes(model, px, depth)
        of_chunks = stage_bytes(model, px, 2 * depth)
        for recompute in (False, True):
            for schedule in SCHEDULES:
                case = Case(schedule, depth, recompute)
                kept = of_chunks if case.strategy.chunks > 1 else kept_alone
                rows += measure(case, model, px, kept, kept_alone)
                peaks = ", ".join(f"{row['measured'] / MIB:.0f}" for row in rows[-depth:])
                print(f"D = {depth}, {case.name}: {peaks} MiB", flush=True)
    return rows


def report(result: dict[str, Any]) -> str:
    """The table of the README: a row for each schedule and depth, ranks from left to right."""
    by_case: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for row in result["rows"]:
        by_case.setdefault((row["depth"], row["schedule"]), []).append(row)
    lines = []
    for (depth, name), rows in by_case.items():
        largest = max((each for row in rows for each in deviations(row)), key=abs)
        lines.append(
            (
                str(depth),
                name,
                str(rows[0]["m"]),
                _mib(rows, "measured"),
                rows[0]["formula"],
                _mib(rows, "formula_bytes") if rows[0]["formula"] else "",
                _mib(rows, "simulated"),
                f"{largest:+.1%}",
            )
        )
    table = markdown_table(
        ("D", "schedule", "m", "measured, MiB, rank 0, 1, ...", "formula", "gives", "simulated", "largest deviation"),
        lines,
    )
    about = f"{result['model']}, {result['px']} px, one tile a microbatch.\n"
    return results("python -m benchmarks.plan_accuracy.activation_bytes --write", about, table)


def _mib(rows: Sequence[dict[str, Any]], key: str) -> str:
    return ", ".join(f"{row[key] / MIB:.0f}" for row in rows)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--model", default="resnet50")
    parser.add_argument("--px", type=int, default=512, help="side of a tile")
    parser.add_argument("--depths", type=int, nargs="+", default=[2, 4], help="numbers of ranks")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # the ranks are threads
    result = {
        "model": arguments.model,
        "px": arguments.px,
        "rows": measure_all(arguments.model, arguments.px, arguments.depths),
        "environment": measured_on(),
    }
    write_json("activation_bytes", result)
    text = report(result)
    publish(__file__, text, arguments.write, "activation_bytes")
    missed = [row for row in result["rows"] if any(abs(each) > DEVIATION for each in deviations(row))]
    for row in missed:
        print(f"missed: {row['schedule']} on rank {row['rank']} of {row['depth']}: {deviations(row)}")
    sys.exit(bool(missed))


if __name__ == "__main__":
    main()
