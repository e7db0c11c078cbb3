"""U-Nets with their long skips under every schedule: the bytes over each link against what the partition's edges say.

Takes nothing; gives bytes from rank to rank for one step on three ranks, which are threads of this process, and what
torch.distributed.pipelining answers to such a split.

    python -m benchmarks.plan_accuracy.links [--px 64] [--models "unet_w8" "unet(2,8)"] [--write]
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.machine import measured_on
from benchmarks.ranks import run_on_ranks
from benchmarks.results import OUT, markdown_table, parser_of, publish, results, write_json
from models.registry import build_model
from parallel.build import assemble
from parallel.comm.communicator import Communicator
from parallel.comm.thread_comm import run_on_threads
from parallel.engine.step import Microbatch
from parallel.graph.layers import RANDOM_STATE
from parallel.graph.partition import Partition, partition_equal
from parallel.offload.rng import state_size
from parallel.schedule.action import Kind
from parallel.schedule.registry import SCHEDULES, build_schedule
from parallel.strategy import Strategy
from parallel.trace.trace import trace

DEPTH, M, CLASSES = 3, 4, 2
CPU = torch.device("cpu")
LINKS = [(source, target) for source in range(DEPTH) for target in range(DEPTH) if source != target]
REFUSED = {"model": "unet_w8", "px": 32, "cuts": ["encoder.2", "encoder.4", "decoder.2.convs"]}


def strategy_for(schedule: str) -> Strategy:
    m = 2 if schedule == "mast" else M
    return Strategy(schedule, DEPTH, DEPTH, m, chunks=2 if SCHEDULES[schedule].chunks else 1)


def build(model: str) -> nn.Module:
    torch.manual_seed(0)
    return build_model(model, classes=CLASSES)


def expected_bytes(partition: Partition, strategy: Strategy) -> Counter[tuple[int, int]]:
    """(rank, rank) -> bytes of one step: each microbatch sends every edge forward once, and its gradient back."""
    mesh = strategy.mesh
    schedule = build_schedule(strategy.name, mesh, strategy.m)
    begun = [a.replica for actions in schedule.values() for a in actions if a.kind is Kind.FORWARD and a.stage == 0]
    found: Counter[tuple[int, int]] = Counter()
    for replica in begun:
        for edge in partition.edges:
            source, target = (mesh.team_at(stage, replica) for stage in (edge.source, edge.target))
            if source == target:
                continue
            random = edge.value == RANDOM_STATE
            size = state_size(CPU) if random else partition.graph.by_name[edge.value].output_bytes
            found[source, target] += size
            if edge.differentiable:
                found[target, source] += size
    return found


def sent_bytes(schedule: str, model: str, px: int, communicator: Communicator, _: Any) -> dict[int, int]:
    """Rank -> bytes that this rank sent it in one step."""
    strategy, shape = strategy_for(schedule), (1, 3, px, px)
    engine = assemble(
        build(model),
        F.cross_entropy,
        partial(torch.optim.SGD, lr=0.0),
        communicator,
        strategy,
        shape=shape,
        batch=strategy.m,
        device=CPU,
    )
    targets = torch.zeros(1, px, px, dtype=torch.int64)
    engine.step([Microbatch(torch.randn(shape), targets, shape) for _ in engine.share], 0, 0.0)
    return dict(engine.bytes_sent)


def measure(model: str, px: int) -> list[dict[str, Any]]:
    """A row for each schedule: bytes over each link, sent and expected."""
    graph = trace(build(model), (1, 3, px, px)).graph
    rows = []
    for schedule in SCHEDULES:
        strategy = strategy_for(schedule)
        partition = partition_equal(graph, strategy.mesh.stages)
        expected = expected_bytes(partition, strategy)
        ranks = run_on_threads(DEPTH, partial(sent_bytes, schedule, model, px), timeout_s=300)
        sent = {(source, target): size for source, own in enumerate(ranks) for target, size in own.items()}
        rows.append(
            {
                "model": model,
                "schedule": schedule,
                "m": strategy.m,
                "stages": partition.depth,
                "skips": sum(edge.target > edge.source + 1 for edge in partition.edges),
                "sent": {f"{a}>{b}": sent.get((a, b), 0) for a, b in LINKS},
                "expected": {f"{a}>{b}": expected[a, b] for a, b in LINKS},
            }
        )
        print(f"{model}, {schedule}: {sum(sent.values()):,} bytes", flush=True)
    return rows


def differences(row: Mapping[str, Any]) -> int:
    """Bytes by which the links differ from the partition, summed without sign."""
    return sum(abs(row["sent"][link] - row["expected"][link]) for link in row["sent"])


def report(px: int, rows: Sequence[Mapping[str, Any]], refusal: str) -> str:
    """The table of the README."""
    names = [f"{a}>{b}" for a, b in LINKS]
    table = markdown_table(
        ("model", "schedule", "m", "stages", "skips", *names, "differs by"),
        [
            (
                row["model"],
                row["schedule"],
                *(str(row[key]) for key in ("m", "stages", "skips")),
                *(f"{row['sent'][name]:,}" for name in names),
                str(differences(row)),
            )
            for row in rows
        ],
    )
    about = (
        f"Tiles of {px} px, one a microbatch, {DEPTH} ranks; bytes of one step from rank to rank. `skips`: values that"
    )
    about += " pass over at least one stage.\n"
    peer = "`torch.distributed.pipelining`, its interleaved schedule with four stages of "
    peer += f"{REFUSED['model']} on two ranks:\n\n    {refusal}\n"
    return results("python -m benchmarks.plan_accuracy.links --write", about, table, peer)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--models", nargs="+", default=["unet_w8", "unet(2,8)"])
    parser.add_argument("--px", type=int, default=64, help="side of a tile")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # the ranks are threads
    rows = [row for model in arguments.models for row in measure(model, arguments.px)]
    refusal = run_on_ranks(2, "benchmarks.plan_accuracy.link_refusal:try_to_step", REFUSED)[0]
    OUT.mkdir(exist_ok=True)
    result = {"px": arguments.px, "rows": rows, "refusal": refusal, "environment": measured_on()}
    write_json("links", result)
    text = report(arguments.px, rows, refusal or "did the step")
    publish(__file__, text, arguments.write, "links")
    missed = [row for row in rows if differences(row)]
    for row in missed:
        print(f"missed: {row['model']}, {row['schedule']}: sent {row['sent']}, the partition says {row['expected']}")
    sys.exit(bool(missed))


if __name__ == "__main__":
    main()
